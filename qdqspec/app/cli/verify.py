"""Commands about faults of a model: ``verify``, the error of its outputs, and ``reduce``, its failure on a backend."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec._core.config import BUILD_OPTIONS, find_folder
from qdqspec._core.records import to_data
from qdqspec.app.cases import find_case, is_spec
from qdqspec.app.cli.command import (
    FINE,
    MODEL,
    WANTING,
    answer,
    argument,
    complain,
    data_given,
    group,
    input_options,
    inputs_given,
    model_given,
    note,
    output,
    refuse_options,
    settings_from,
    verb,
    writable_folder,
)
from qdqspec.errors import ConfigError, StateError
from qdqspec.types import NOT_CANDIDATES, Case, Probe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qdqspec.app.reduce import Reduced
    from qdqspec.app.session import Session
    from qdqspec.checks import ParityCheck

_LIMITS = ("min_sqnr_db", "min_cosine", "max_abs", "max_steps", "min_slice_sqnr_db")
_MINUTES = 5.0  # of a reduction


@verb(
    "verify",
    "qdqspec verify model.onnx tuned.onnx --data data.npz --min-sqnr-db 25\n"
    "  qdqspec verify specs/model.qdq.yaml::default\n"
    "  qdqspec verify model.onnx tuned.onnx --input reports/model/default/parity/parity.npz",
    argument("model", "MODEL|SPEC::CASE", "The original model, or a case of a spec."),
    argument(
        "tuned",
        "TUNED",
        "A model with the same inputs (default of a case: the tuned model in its results).",
        type=Path,
        nargs="?",
    ),
    group(
        "",
        argument(
            "--data --evaluation",
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
    *input_options(),
    *(
        argument(
            f"--{name.replace('_', '-')}", "X", "The limit of the same name of check `parity`.", type=float
        )
        for name in _LIMITS
    ),
    argument("--outputs", "GLOB", "Limits hold for outputs with matching names only.", nargs="+"),
    options=("backend", "device", "threads", "seed", "build-limit", *BUILD_OPTIONS),
)
def verify(arguments: argparse.Namespace) -> int:
    """Measure the error of a tuned model's outputs. The shares of quantization and of the runtime are separated.
    Nothing is timed. A case of a spec is compared on its data, with the limits of its checks `parity` where the command
    line has none. Exits 1 where a limit is not kept.
    """
    from qdqspec.app.report.record import parity_to_json
    from qdqspec.app.report.tables import section_text
    from qdqspec.app.session import Session
    from qdqspec.checks import ParityCheck, compared_sections, noise_shares, number_notes, slice_notes

    if arguments.input is not None:
        refuse_options(arguments, "shapes", "--data")
    with Session(replace(settings_from(arguments), mode="verify")) as session:
        case = _case_given(arguments, session)
        tuned = arguments.tuned
        if tuned is None and case.spec is None:
            cure = "qdqspec verify MODEL TUNED, or qdqspec verify SPEC::CASE"
            raise ConfigError("no tuned model is given", where=arguments.model, cure=cure)
        if tuned is None:
            tuned = find_folder(session.settings, case) / "tuned.onnx"
            if not tuned.is_file():
                cure = f"run it once: pytest {arguments.model}"
                raise StateError(f"there is no tuned model of {case.name} yet", where=tuned, cure=cure)
        given = _limits_given(arguments)
        limits = [given] if given else [c.params for c in case.checks if isinstance(c.params, ParityCheck)]
        if arguments.outputs:
            limits = [one.model_copy(update={"outputs": tuple(arguments.outputs)}) for one in limits]
        if arguments.input is not None:
            if arguments.min_slice_sqnr_db is not None:
                raise ConfigError(
                    "--min-slice-sqnr-db: a slice of one input has too few values to be judged",
                    cure="give data with --data in place of --input",
                )
            own = limits[0] if given else None
            probe = session.probe(case.model, tuned, arguments.input, own, values=case.inputs.values)
        else:
            parity = session.work(case).parity_with(tuned.absolute())
            broken = [words for one in limits for words in one.broken_limits(parity)]
            probe = Probe(inputs=(), broken=(*dict.fromkeys(broken),), parity=parity)
            for text in (*session.work(case).warnings, *number_notes(parity.outputs)):
                note(text)
    parity = probe.parity
    is_limited = bool(limits or probe.inputs)
    kept = "no limit is broken" if is_limited else "not judged: no limit is given, such as --min-sqnr-db 20"
    headline = probe.broken[0] if probe.broken else kept
    data = {
        "headline": headline,
        "broken": list(probe.broken),
        "inputs": [asdict(one) for one in probe.inputs],
        "parity": parity_to_json(parity),
        "noise": noise_shares(parity),
        "notes": [*slice_notes(parity.outputs)],
    }
    text = "\n\n".join((headline, *map(section_text, compared_sections(probe, limits))))
    return answer(arguments, data, text, code=WANTING if probe.broken else FINE)


def _case_given(arguments: argparse.Namespace, session: Session) -> Case:
    """The case of a spec, or of a model, with the inputs of the command line."""
    if is_spec(Path(arguments.model.partition("::")[0])):
        case = find_case(arguments.model, session.settings, Path.cwd())
        return replace(case, inputs=inputs_given(case.inputs, arguments, arguments.values))
    words = {"evaluation": arguments.data, "shapes": arguments.shapes, "values": arguments.values}
    return session.case(arguments.model, {word: value for word, value in words.items() if value is not None})


def _limits_given(arguments: argparse.Namespace) -> ParityCheck | None:
    """The limits on the command line as parameters of a check; ``None`` if there are none."""
    from pydantic import ValidationError

    from qdqspec.checks import ParityCheck

    given = {name: value for name in _LIMITS if (value := getattr(arguments, name)) is not None}
    if not given:
        return None
    try:
        return ParityCheck.model_validate({"kind": "parity", **given})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"{option}: {first['msg']}", cure="qdqspec verify --help") from None


# ---- reduction -----------------------------------------------------------------------------------


@verb(
    "reduce",
    "qdqspec reduce model.qdq.onnx -o fault/",
    MODEL,
    output("DIR", "Folder for the reduced model and the program."),
    argument(
        "--minutes",
        "M",
        f"Time limit; the smallest model by then is written (default: {_MINUTES:g}).",
        type=float,
        default=_MINUTES,
    ),
    *input_options(),
    options=("backend", "device", "threads", "seed", "build-limit", "backend-option", "plugin"),
)
def reduce(arguments: argparse.Namespace) -> int:
    """Reduce a model that a backend fails on to a few nodes. They have random weights and fail in the same way:
    the backend rejects them or crashes. A program that shows it is written too.
    """
    from qdqspec.app.reduce import reduce_model, with_shapes
    from qdqspec.backends import BuildOptions, Isolated

    settings = settings_from(arguments)
    model = model_given(arguments.model, arguments.values)
    if arguments.shapes is not None:
        model = with_shapes(model, arguments.shapes)
    folder = writable_folder(arguments.output.absolute())
    with closing(Isolated(settings.backend)) as backend:
        found = reduce_model(
            model,
            backend,
            BuildOptions.of(settings),
            folder,
            seconds=60 * arguments.minutes,
            seed=settings.seed,
        )
    return answer(arguments, to_data(found), reduced_text(found))


def reduce_failures(session: Session, cases: Iterable[Case]) -> None:
    """Reduce the first candidate of each case that failed to build or run, into ``faults/`` of its folder."""
    from qdqspec._core.files import TemporaryFolder
    from qdqspec.app.preparation.files import write_placement
    from qdqspec.app.preparation.stored import make_folder
    from qdqspec.app.reduce import reduce_model
    from qdqspec.graph import load_model

    for case in cases:
        setup, found = session.work(case).prepared, session.work(case).found
        trials = () if found is None else found.result.trials
        failed = [t for t in trials if not t.ok and t.phase not in NOT_CANDIDATES and not t.subgraph]
        for trial in failed[:1]:
            folder = setup.output / "faults" / f"{trial.number:03d}-{trial.placement.digest}"
            complain(f"{case.name}: trial {trial.number} failed; it is reduced")
            with TemporaryFolder() as scratch:
                path = scratch / "candidate.onnx"
                write_placement(setup, trial.placement, path)
                make_folder(folder)
                try:
                    options = setup.resources.options
                    reduced = reduce_model(
                        load_model(path), setup.backend, options, folder, seconds=60 * _MINUTES
                    )
                except StateError as error:
                    complain(f"{case.name}: trial {trial.number}: {error}")
                else:
                    complain(f"{case.name}: {reduced_text(reduced)}")


def reduced_text(found: Reduced) -> str:
    """The reduced model as text, and its folder."""
    lines = [
        f"{found.nodes_before} nodes reduced to {found.nodes} in {found.attempts} attempts ({found.seconds:.0f} s): "
        + found.failure.partition("\n")[0],
        f"Model and program: {found.model}, {found.program.name}",
    ]
    if found.kept:
        lines.append(f"The fault needs the values of {', '.join(found.kept)}; all other weights are random.")
    if not found.complete:
        lines.append("The time ended before nothing more could be removed: give it more with --minutes.")
    return "\n".join(lines)
