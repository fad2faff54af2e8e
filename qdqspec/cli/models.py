"""Commands about one model: ``inspect``, ``apply`` and ``strip``. None of them writes to an input."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec.cli.words import (
    FINE,
    Verbs,
    add_inputs,
    add_values,
    add_verb,
    backend_named,
    conclude,
    inputs_given,
    model_given,
    say,
    say_json,
    settings_from,
)
from qdqspec.collector import uncollected

if TYPE_CHECKING:
    from qdqspec.config import Settings
    from qdqspec.graph.model import Model
    from qdqspec.regions.inspect import InspectSection
    from qdqspec.regions.inspection import Judged

SECTIONS: tuple[InspectSection, ...] = ("regions", "patterns")


def add_verbs(verbs: Verbs) -> None:
    """Declare the three commands."""
    _add_inspect(verbs)
    applying = add_verb(
        verbs,
        "apply",
        apply,
        does="Insert the Q/DQ pairs of a scheme into a model.",
        example="qdqspec apply model.onnx scheme.json -o model.qdq.onnx",
    )
    applying.add_argument("model", type=Path, metavar="MODEL")
    applying.add_argument(
        "scheme", type=Path, metavar="SCHEME", help="The scheme.json that a run or `import` wrote."
    )
    applying.add_argument("-o", "--output", type=Path, metavar="OUT", required=True)
    add_values(applying)
    stripping = add_verb(
        verbs,
        "strip",
        strip,
        does="Remove every Q/DQ pair from a model.",
        example="qdqspec strip model.qdq.onnx -o model.onnx",
    )
    stripping.add_argument("model", type=Path, metavar="MODEL")
    stripping.add_argument("-o", "--output", type=Path, metavar="OUT", required=True)
    stripping.add_argument(
        "--reference",
        type=Path,
        metavar="ORIGINAL",
        help="The original model, whose float weights are restored bit for bit.",
    )
    add_values(stripping, "the reference")


def _add_inspect(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "inspect",
        inspect,
        does="Print regions, their patterns, and what can be quantized.",
        example="qdqspec inspect model.onnx --verbose",
        options=["backend", "device"],
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    add_inputs(parser, data="Inputs whose shapes are used without --shapes.")
    parser.add_argument("--regions", action="store_true", help="Only the regions.")
    parser.add_argument("--patterns", action="store_true", help="Only the patterns.")
    parser.add_argument("--verbose", action="store_true", help="Also node names and boundaries.")
    parser.add_argument(
        "--include-all", action="store_true", help="Also regions without quantizable operators."
    )
    parser.add_argument(
        "--max-nodes",
        type=_positive,
        metavar="N",
        help="Nodes of the largest leaf, as `regions.max_nodes` of a spec says it (default: 10).",
    )
    parser.add_argument(
        "--lines",
        type=_positive,
        default=40,
        metavar="N",
        help="Largest number of lines of each list (default: 40).",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


@uncollected()
def inspect(arguments: argparse.Namespace) -> int:
    """Divide the model into regions and print them with the backend's ratings."""
    from qdqspec.parity.data import shaped_by_data
    from qdqspec.parity.shapes import require_inputs
    from qdqspec.regions.forecast import forecast_tuning
    from qdqspec.regions.inspect import render_text, to_json
    from qdqspec.regions.inspection import find_bodies, inspect_model
    from qdqspec.regions.search import find_regions
    from qdqspec.types import TRIALS, Inputs, RegionRules

    rules = RegionRules() if arguments.max_nodes is None else RegionRules(max_nodes=arguments.max_nodes)
    find = partial(find_regions, rules=rules)
    model = model_given(arguments.model, arguments.values)
    regions = find(model)
    inputs = inputs_given(Inputs(), shapes=arguments.shapes, data=arguments.data)
    require_inputs(model, inputs)
    known = shaped_by_data(model, inputs).profiles[0].opt()
    inspection = inspect_model(
        model,
        regions,
        judged(model, settings_from(arguments)),
        bodies=find_bodies(model, regions, find),
        forecast=forecast_tuning(model, TRIALS["default"], known),
    )
    if arguments.json:
        say_json(to_json(inspection))
        return FINE
    say(
        render_text(
            inspection,
            verbose=arguments.verbose,
            lines=arguments.lines,
            include_all=arguments.include_all,
            only=[section for section in SECTIONS if getattr(arguments, section)],
        )
    )
    return FINE


def judged(model: Model, settings: Settings) -> Judged:
    """The operators that the backend may quantize, from its table if the backend does not work on this machine."""
    from qdqspec.backends.base import BuildOptions
    from qdqspec.placement.judging import judge

    backend, options = backend_named(settings.backend), BuildOptions.of(settings)
    here = backend.probe(options)
    note = "" if here.usable else f"{here.why}; from what is known of it"
    return judge(model, backend.capabilities(options), backend=backend.name, note=note)


@uncollected()
def apply(arguments: argparse.Namespace) -> int:
    """Write the model with the pairs of the scheme."""
    from qdqspec.graph.model import Model
    from qdqspec.graph.save import save_model
    from qdqspec.placement.scheme import apply_scheme

    model = model_given(arguments.model, arguments.values)
    result = apply_scheme(model, arguments.scheme)
    save_model(
        result.proto, arguments.output, inputs=[arguments.scheme, *model.user_files], base=_folder_of(model)
    )
    notes = [*model.notes, *result.notes]
    pairs = _dequantized(Model(result.proto))
    return conclude(arguments, f"{pairs} dequantized tensors in it", notes, {"pairs": pairs})


@uncollected()
def strip(arguments: argparse.Namespace) -> int:
    """Write the model without pairs, and report what could not be restored exactly."""
    from qdqspec.graph.save import save_model
    from qdqspec.placement.strip import strip_qdq

    model = model_given(arguments.model)
    reference = None if arguments.reference is None else model_given(arguments.reference, arguments.values)
    removed = _dequantized(model)
    result = strip_qdq(model, reference)
    given = (model, *(() if reference is None else (reference,)))
    inputs = [file for one in given for file in one.user_files]
    save_model(result.proto, arguments.output, inputs=inputs, base=_folder_of(model))
    notes = [*model.notes, *result.notes]
    return conclude(arguments, f"{removed} dequantized tensors removed", notes, {"pairs": removed})


def _folder_of(model: Model) -> Path:
    """The folder of a model's external data."""
    assert model.path is not None
    return model.path.parent


def _dequantized(model: Model) -> int:
    """The number of dequantized tensors of a model; scales that are dequantized themselves do not count."""
    from qdqspec.placement.recognize import is_op
    from qdqspec.placement.restore import makes_scale

    made = (node for node in model.nodes if is_op(node, "DequantizeLinear"))
    return sum(not makes_scale(model, node.outputs[0]) for node in made)
