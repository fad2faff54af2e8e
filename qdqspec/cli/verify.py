"""Command ``verify``: measure the output error of a tuned model, on data or on one saved input."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec.cli.arguments import ArgumentGroup, argument, data_given, input_options, settings_from, verb
from qdqspec.cli.output import FINE, WANTING, answer, note
from qdqspec.config.options import BUILD_OPTIONS
from qdqspec.errors import ConfigError
from qdqspec.types import Probe

if TYPE_CHECKING:
    from qdqspec.checks.parity import ParityParams
    from qdqspec.session import Session

_LIMITS = ("min_sqnr_db", "min_cosine", "max_abs", "max_steps")


@verb(
    "verify",
    "qdqspec verify model.onnx tuned.onnx --data data.npz --min-sqnr-db 25\n"
    "  qdqspec verify model.onnx tuned.onnx --input reports/model/default/parity/parity.npz",
    argument("model", "MODEL", "The original model.", type=Path),
    argument("tuned", "TUNED", "A model with the same inputs.", type=Path),
    ArgumentGroup(
        "",
        (
            argument(
                "--data",
                "PATH",
                "Inputs to compare on, as `tune --evaluation` takes them (default: random ones).",
                type=data_given,
            ),
            argument(
                "--input",
                "NPZ",
                "One input, saved by a parity check together with the limits that it broke.",
                type=Path,
            ),
        ),
    ),
    *input_options(),
    *(
        argument(
            f"--{name.replace('_', '-')}", "X", "The limit of the same name of check `parity`.", type=float
        )
        for name in _LIMITS
    ),
    argument("--outputs", "GLOB", "Only outputs with matching names.", nargs="+"),
    options=("backend", "device", "threads", "seed", "build-limit", *BUILD_OPTIONS),
)
def verify(arguments: argparse.Namespace) -> int:
    """Measure the error of a tuned model's outputs. The shares of quantization and of the runtime are separated.
    Nothing is timed. Exits 1 where a limit is not kept.
    """
    from qdqspec.session import Session

    limits = _limits(arguments)
    with Session(replace(settings_from(arguments), mode="verify")) as session:
        if arguments.input is not None:
            probe = session.probe(
                arguments.model,
                arguments.tuned,
                arguments.input,
                limits,
                values=arguments.values or {},
            )
        else:
            probe = _compared(arguments, session, limits)
    if probe.parity.data == "random" and not probe.inputs:
        note("inputs are random here, and errors on real data differ: give data with --data")
    is_limited = limits is not None or bool(probe.inputs)
    kept = "no limit is broken" if is_limited else "not judged: no limit is given, such as --min-sqnr-db 20"
    headline = probe.broken[0] if probe.broken else kept
    answer(arguments, _json(probe, headline), _text(probe, headline))
    return WANTING if probe.broken else FINE


def _compared(arguments: argparse.Namespace, session: Session, limits: ParityParams | None) -> Probe:
    """The comparison of the models on all of the data: exceeded limits, and the measured values."""
    words = {"evaluation": arguments.data, "shapes": arguments.shapes, "values": arguments.values}
    case = session.case(arguments.model, {word: value for word, value in words.items() if value is not None})
    parity = session.work(case).parity_with(arguments.tuned.absolute())
    broken = () if limits is None else limits.broken_by(parity.outputs, whole=True)
    return Probe(inputs=(), broken=broken, parity=parity)


def _limits(arguments: argparse.Namespace) -> ParityParams | None:
    """The limits on the command line as parameters of a check; ``None`` if there are none."""
    from pydantic import ValidationError

    from qdqspec.checks.parity import ParityParams

    given = {name: value for name in _LIMITS if (value := getattr(arguments, name)) is not None}
    if not given:
        return None
    words = given | ({"outputs": arguments.outputs} if arguments.outputs else {})
    try:
        return ParityParams.model_validate({"kind": "parity", **words})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"{option}: {first['msg']}", cure="qdqspec verify --help") from None


def _text(probe: Probe, headline: str) -> str:
    from qdqspec.checks.parity import comparison_sections, probe_sections
    from qdqspec.report.tables import section_text

    if probe.inputs:
        sections = probe_sections(probe)
    else:
        title = f"Outputs, worst first ({probe.parity.samples} samples of {probe.parity.data} data)"
        sections = comparison_sections(probe.parity, title)
    return "\n\n".join((headline, *(section_text(section) for section in sections)))


def _json(probe: Probe, headline: str) -> dict[str, Any]:
    from qdqspec.checks.parity import noise_shares
    from qdqspec.report.record import parity_to_json

    return {
        "headline": headline,
        "broken": list(probe.broken),
        "inputs": [asdict(one) for one in probe.inputs],
        "parity": parity_to_json(probe.parity),
        "noise": noise_shares(probe.parity),
    }
