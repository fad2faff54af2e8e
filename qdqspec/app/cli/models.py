"""Commands about models: ``inspect``, ``apply``, ``strip``, ``import``, ``diff``, ``fold`` and ``lint``.

None of them writes to an input.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec._core import hooks
from qdqspec._core.config import BUILD_OPTIONS
from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec._core.units import count_text
from qdqspec.app.cli.command import (
    FINE,
    MODEL,
    WANTING,
    answer,
    argument,
    at_least_one,
    complain,
    conclude,
    input_options,
    inputs_given,
    model_given,
    output,
    refuse_input_as_output,
    refuse_options,
    settings_from,
    switch,
    values_option,
    verb,
)
from qdqspec.errors import ConfigError, ModelError, PlacementError
from qdqspec.types import TIMED_TRIALS, Inputs, RegionRules

if TYPE_CHECKING:
    from collections.abc import Sequence

    import onnx

    from qdqspec._core.config import Settings
    from qdqspec.graph import Model
    from qdqspec.graph.regions import InspectSection, Judged


SECTIONS: tuple[InspectSection, ...] = ("regions", "patterns")
_OF_REFERENCE = "the model of --reference"
ROWS = 12  # of each kind, that `diff` shows without ``--verbose``


@verb(
    "inspect",
    "qdqspec inspect model.onnx --verbose",
    MODEL,
    *input_options(data="Inputs whose shapes are used without --shapes."),
    switch("--regions", "Only the regions."),
    switch("--patterns", "Only the patterns."),
    switch("--verbose", "Also node names and boundaries."),
    switch("--include-all", "Also regions without quantizable operators."),
    argument(
        "--max-nodes",
        "N",
        "Nodes of the largest leaf, as `regions.max_nodes` of a spec (default: 10).",
        type=at_least_one,
    ),
    argument(
        "--lines", "N", "Largest number of lines of each list (default: 40).", type=at_least_one, default=40
    ),
    options=("backend", "device"),
)
def inspect(arguments: argparse.Namespace) -> int:
    """Print regions, their patterns and quantizable operators."""
    from qdqspec.accuracy import CaseData
    from qdqspec.graph.regions import (
        find_regions,
        forecast_tuning,
        inspect_model,
        inspection_text,
        inspection_to_json,
    )

    rules = RegionRules() if arguments.max_nodes is None else RegionRules(max_nodes=arguments.max_nodes)
    model = model_given(arguments.model, arguments.values)
    data = CaseData(model, inputs_given(Inputs(), arguments))
    data.require_names()
    data = data.shaped()
    known = data.profiles[0].opt() if data.inputs.profiles[0].shapes else {}
    inspection = inspect_model(
        model,
        find_regions(model, rules),
        judged(model, settings_from(arguments)),
        forecast=forecast_tuning(model, TIMED_TRIALS["default"], known),
    )
    text = inspection_text(
        inspection,
        verbose=arguments.verbose,
        lines=arguments.lines,
        include_all=arguments.include_all,
        only=[section for section in SECTIONS if getattr(arguments, section)],
    )
    return answer(arguments, inspection_to_json(inspection), text)


def judged(model: Model, settings: Settings) -> Judged:
    """The operators that the backend may quantize, from its table if the backend does not work on this machine."""
    from qdqspec.backends import BuildOptions, backend_named
    from qdqspec.qdq import judge

    backend, options = backend_named(settings.backend), BuildOptions.of(settings)
    here = backend.probe(options)
    note = "" if here.usable else f"{here.why}; from what is known of it"
    return judge(model, backend.capabilities(options), backend=backend.name, note=note)


@verb(
    "apply",
    "qdqspec apply model.onnx scheme.json -o model.qdq.onnx",
    MODEL,
    argument("scheme", "SCHEME", "The scheme.json that a run or `import` wrote.", type=Path),
    output("OUT"),
    values_option(),
)
def apply(arguments: argparse.Namespace) -> int:
    """Insert the Q/DQ pairs of a scheme into a model."""
    from qdqspec.graph import Model
    from qdqspec.qdq import SchemeFile, count_dequantized

    model = model_given(arguments.model, arguments.values)
    result = SchemeFile.read(arguments.scheme).apply(model)
    inputs = [arguments.scheme, *model.user_files]
    before, pairs = count_dequantized(model), count_dequantized(Model(result.proto))
    had = f", {before} of them before" if before else ""
    summary = f"{count_text(pairs, 'dequantized tensor')} in it{had}"
    return _write(arguments, model, result.proto, inputs, summary, [*model.notes, *result.notes], pairs=pairs)


def _write(
    arguments: argparse.Namespace,
    model: Model,
    made: onnx.ModelProto,
    inputs: Sequence[Path],
    summary: str,
    notes: Sequence[str],
    **counts: int,
) -> int:
    """Write what was ``made`` of a model, and conclude with the warnings of ONNX's checker about it."""
    from qdqspec.graph import load_model, require_path, save_model

    save_model(made, arguments.output, inputs=inputs, base=require_path(model).parent)
    try:
        found = load_model(arguments.output).type_problem()
        problem = f"the model is not valid ONNX: {found}" if found else ""
    except ModelError as error:
        problem = error.what
    warnings = [f"{arguments.output}: {problem}"] if problem else []
    for warning in warnings:
        complain(f"warning: {warning}")
    return conclude(arguments, summary, notes, {**counts, "warnings": warnings})


@verb(
    "strip",
    "qdqspec strip model.qdq.onnx -o model.onnx",
    MODEL,
    output("OUT"),
    argument(
        "--reference",
        "ORIGINAL",
        "The original model, whose float weights are restored bit for bit.",
        type=Path,
    ),
    values_option("the reference"),
)
def strip(arguments: argparse.Namespace) -> int:
    """Remove every Q/DQ pair from a model."""
    from qdqspec.graph import Model
    from qdqspec.qdq import count_dequantized, strip_qdq

    model = model_given(arguments.model)
    if arguments.reference is None:
        refuse_options(arguments, "values", _OF_REFERENCE)
    reference = None if arguments.reference is None else model_given(arguments.reference, arguments.values)
    result = strip_qdq(model, reference)
    left = count_dequantized(Model(result.proto, path=model.path))
    removed = count_dequantized(model) - left
    given = (model, *(() if reference is None else (reference,)))
    inputs = [file for one in given for file in one.user_files]
    if removed or left:
        summary = count_text(removed, "dequantized tensor") + " removed" + (f", {left} left" if left else "")
    else:
        summary = "a copy of the model, which has no Q/DQ pairs"
    notes = [*model.notes, *result.notes]
    return _write(arguments, model, result.proto, inputs, summary, notes, pairs=removed, left=left)


@verb(
    "import",
    "qdqspec import by-hand.qdq.onnx -o scheme.json",
    argument("model", "QDQ_MODEL", type=Path),
    output("SCHEME"),
    argument(
        "--reference",
        "ORIGINAL",
        "The model before quantization; its names of tensors and nodes are used.",
        type=Path,
    ),
    values_option("the reference"),
)
def import_model(arguments: argparse.Namespace) -> int:
    """Write the Q/DQ pairs of a quantized model as a scheme. Their scales and zero points are kept, and the model
    may be from another tool.
    """
    from qdqspec.qdq import import_placement

    given = [path for path in (arguments.model, arguments.reference) if path is not None]
    refuse_input_as_output(arguments.output, given)
    if arguments.reference is None:
        refuse_options(arguments, "values", _OF_REFERENCE)
    reference = None if arguments.reference is None else model_given(arguments.reference, arguments.values)
    imported = import_placement(model_given(arguments.model), reference)
    if not imported.pairs:
        raise PlacementError(
            "it has no Q/DQ pair that a scheme can carry",
            where=arguments.model,
            cure="; ".join(imported.notes) or "name a model with QuantizeLinear and DequantizeLinear nodes",
        )
    imported.write(arguments.output)
    activations = imported.placement.pairs
    counts = {"activations": activations, "weights": len(imported.pairs) - activations}
    summary = f"{activations} activation and {counts['weights']} weight pairs in it"
    notes = [*imported.notes, *imported.unlike]
    return conclude(arguments, summary, notes, {"digest": imported.placement.digest, **counts})


@verb(
    "diff",
    "qdqspec diff model.onnx tuned.onnx",
    argument("first", "A", type=Path),
    argument("second", "B", type=Path),
    switch("--verbose", f"Show all, not {ROWS} of a kind."),
)
def diff(arguments: argparse.Namespace) -> int:
    """Compare the Q/DQ of two models. Exits 0 when they are the same, 1 when not."""
    from qdqspec.qdq import diff_models

    found = diff_models(model_given(arguments.first), model_given(arguments.second))
    text = found.text(most=None if arguments.verbose else ROWS)
    return answer(arguments, found.to_json(), text, code=FINE if found.same else WANTING)


@verb("fold", "qdqspec fold model.qdq.onnx -o folded.onnx", MODEL, output("OUT"))
def fold(arguments: argparse.Namespace) -> int:
    """Fold constants and remove unread nodes. QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear and operators
    of other domains are never folded.
    """
    from qdqspec.graph import fold_constants, load_model

    model = load_model(arguments.model)
    result = fold_constants(model)
    left = sum(not node.is_marker for node in result.model.nodes)
    counts = {"folded": len(result.folded), "dead": len(result.unused), "nodes": left}
    summary = f"{counts['folded']} nodes folded and {counts['dead']} unread ones dropped, {left} left"
    return _write(arguments, model, result.model.proto, model.user_files, summary, result.notes, **counts)


def _capability(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise argparse.ArgumentTypeError(f"'{text}' is not a compute capability such as 8.9")
    return int(major), int(minor)


@verb(
    "lint",
    f"qdqspec lint model.qdq.onnx --target {DEFAULT_BACKEND}-cpu --strict",
    MODEL,
    argument(
        "--target",
        "T",
        "A target for which a backend has rules; without one, the error lists all. Repeatable.",
        action="append",
    ),
    switch("--strict", "Exit 1 also on findings of severity slow."),
    argument(
        "--compute-capability",
        "M.N",
        "Compute capability of the GPU, such as 8.9; without it, findings that depend on it are notes.",
        type=_capability,
    ),
    values_option(),
    switch("--all", "List all nodes of a rule, instead of five."),
    switch("--no-load", "Judge by static rules and ONNX's checker only, and load the model in no runtime."),
    options=("device", "threads", "build-limit", *BUILD_OPTIONS),
)
def lint(arguments: argparse.Namespace) -> int:
    """List nodes that a target rejects or runs slowly. The runtime of the target loads the model if it is installed
    here. Exits 1 if the target rejects one.
    """
    from qdqspec.app.evidence.builds import lint_and_load
    from qdqspec.backends import BuildOptions
    from qdqspec.qdq.lint import findings_to_json, render_findings

    if not arguments.target:
        known = ", ".join(hooks.all_names("lint_targets"))
        raise ConfigError("no target is given", cure=f"name one with --target, of: {known}")
    model = model_given(arguments.model, arguments.values)
    options = BuildOptions.of(settings_from(arguments))
    most = 0 if arguments.all else 5
    texts, found, loads = [], {}, {}
    for target in dict.fromkeys(arguments.target):
        each = lint_and_load(
            model,
            target,
            options=options,
            loads=not arguments.no_load,
            compute_capability=arguments.compute_capability,
        )
        texts.append(render_findings(target, each.findings, most=most, judged=each.note))
        found[target] = each.findings
        loads[target] = {"runtime": each.runtime, "loaded": each.loaded, "note": each.note}
    wanting = ("refused", "slow") if arguments.strict else ("refused",)
    code = WANTING if any(f.severity in wanting for fs in found.values() for f in fs) else FINE
    return answer(arguments, {**findings_to_json(found), "loads": loads}, "\n\n".join(texts), code=code)
