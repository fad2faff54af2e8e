"""Commands about the Q/DQ pairs of models: ``import``, ``diff`` and ``fold``. None writes to an input."""

from __future__ import annotations

import argparse
from pathlib import Path

from qdqspec.cli.words import (
    FINE,
    WANTING,
    Verbs,
    add_values,
    add_verb,
    answer,
    conclude,
    model_given,
    refuse_input_as_output,
)
from qdqspec.collector import uncollected
from qdqspec.errors import PlacementError

ROWS = 12  # of each kind, that `diff` shows without ``--all``


def add_verbs(verbs: Verbs) -> None:
    """Declare the three commands."""
    importing = add_verb(
        verbs,
        "import",
        import_model,
        does="Write the Q/DQ pairs of a quantized model as a scheme. Their scales and zero points are kept, and the "
        "model may be from another tool.",
        example="qdqspec import by-hand.qdq.onnx -o scheme.json",
    )
    importing.add_argument("model", type=Path, metavar="QDQ_MODEL")
    importing.add_argument("-o", "--output", type=Path, metavar="SCHEME", required=True)
    importing.add_argument(
        "--reference",
        type=Path,
        metavar="ORIGINAL",
        help="The model before quantization; its names of tensors and nodes are used.",
    )
    add_values(importing, "the reference")
    differing = add_verb(
        verbs,
        "diff",
        diff,
        does="Compare the Q/DQ of two models. Exits 0 when they are the same, 1 when not.",
        example="qdqspec diff model.onnx tuned.onnx",
    )
    differing.add_argument("first", type=Path, metavar="A")
    differing.add_argument("second", type=Path, metavar="B")
    differing.add_argument("--verbose", action="store_true", help=f"Show all, not {ROWS} of a kind.")
    folding = add_verb(
        verbs,
        "fold",
        fold,
        does="Fold constants and remove what no node reads. QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear "
        "and operators of other domains are never folded.",
        example="qdqspec fold model.qdq.onnx -o folded.onnx",
    )
    folding.add_argument("model", type=Path, metavar="MODEL")
    folding.add_argument("-o", "--output", type=Path, metavar="OUT", required=True)


@uncollected()
def import_model(arguments: argparse.Namespace) -> int:
    """Read the pairs of a model and write them as a scheme."""
    from qdqspec.placement.import_qdq import import_placement
    from qdqspec.placement.scheme import IMPORTED, write_scheme

    given = [path for path in (arguments.model, arguments.reference) if path is not None]
    refuse_input_as_output(arguments.output, given)
    reference = None if arguments.reference is None else model_given(arguments.reference, arguments.values)
    imported = import_placement(model_given(arguments.model), reference)
    if not imported.pairs:
        raise PlacementError(
            "it has no Q/DQ pair that a scheme can carry",
            where=arguments.model,
            cure="; ".join(imported.notes) or "name a model with QuantizeLinear and DequantizeLinear nodes",
        )
    write_scheme(
        arguments.output,
        imported.placement,
        imported.pairs,
        IMPORTED,
        imported.positions,
        factors=imported.equalized,
    )
    activations = imported.placement.pairs
    counts = {"activations": activations, "weights": len(imported.pairs) - activations}
    summary = f"{activations} activation and {counts['weights']} weight pairs in it"
    return conclude(arguments, summary, imported.notes, {"digest": imported.placement.digest, **counts})


@uncollected()
def diff(arguments: argparse.Namespace) -> int:
    """Compare two models, with their local functions inlined."""
    from qdqspec.placement.diff import diff_models, render_text, to_json

    found = diff_models(model_given(arguments.first), model_given(arguments.second))
    answer(arguments, to_json(found), render_text(found, most=None if arguments.verbose else ROWS))
    return FINE if found.same else WANTING


@uncollected()
def fold(arguments: argparse.Namespace) -> int:
    """Write the model with its constants folded."""
    from qdqspec.graph.constants import fold_constants
    from qdqspec.graph.model import load_model
    from qdqspec.graph.save import save_model

    model = load_model(arguments.model)
    result = fold_constants(model)
    base = arguments.model.absolute().parent
    inputs = [arguments.model, *model.external_files()]
    save_model(result.model.proto, arguments.output, inputs=inputs, base=base)
    left = sum(not node.is_marker for node in result.model.nodes)
    counts = {"folded": len(result.folded), "dead": len(result.dead), "nodes": left}
    summary = (
        f"{counts['folded']} nodes folded and {counts['dead']} unread ones dropped, {counts['nodes']} left"
    )
    return conclude(arguments, summary, result.notes, counts)
