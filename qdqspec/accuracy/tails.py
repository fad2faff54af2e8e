"""The error before trailing operators that saturate or select: the SQNR after a Softmax hides that of its input.

The tensors are the only outputs of models of their own, which are built for this comparison: as further outputs of the
compared models they would change what the backend fuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from qdqspec.accuracy.parity import SideBySide
from qdqspec.backends.base import Engine
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model, Node, load_model, require_path
from qdqspec.graph.observe import Observer, observe
from qdqspec.graph.save import save_model
from qdqspec.parity.compare import OutputComparison
from qdqspec.parity.gate import SAMPLES
from qdqspec.parity.notes import tail_text
from qdqspec.placement.space.units import Edge
from qdqspec.preparation.case import CaseSetup
from qdqspec.preparation.definition import Definition
from qdqspec.rehearsal import trailing_operators
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import ParityEvidence, TailParity


def with_tails(setup: CaseSetup, tuned: Path, parity: ParityEvidence) -> ParityEvidence:
    """The comparison with the SQNR before trailing operators of the outputs, on the first `SAMPLES` inputs.

    Nothing is built if no output has such operators, if the tuned model is the reference, or has no tensor of the same
    name. If a model cannot be built or run with the tensors as its outputs, a note of the case has the reason.
    """
    is_defined = parity.definition is None or parity.definition.holds
    fixed = setup.fixed if is_defined else {}
    reference = load_model(setup.case.model.absolute()) if fixed else setup.given
    if tuned == require_path(reference):
        return parity
    models = reference, load_model(tuned)
    tails = [*_tails(*models)]
    if not tails:
        return parity
    try:
        with TemporaryFolder() as folder:
            files = folder / "reference.onnx", folder / "tuned.onnx"
            observers = _written(models, tails, files)
            expected = None if is_defined else partial(_build_definition, setup, files[0])
            with SideBySide(setup.resources, *files, fixed, expected=expected, divided=False) as engines:
                return replace(parity, before_tails=_compared(setup, tails, observers, engines))
    except BackendError as error:
        first = tail_text(tails[0][0])
        setup.prepared.note_once(f"the SQNR {first} was not measured: {error.what}")
        return parity


def _build_definition(setup: CaseSetup, file: Path) -> Engine:
    return Definition(load_model(file), setup.backend, setup.resources.options).build()


def _tails(reference: Model, tuned: Model) -> Iterator[tuple[TailParity, str]]:
    """The tensors before trailing operators, still without SQNR, each with its name in the tuned model."""
    for output in dict.fromkeys(reference.outputs):
        for edge, operator in trailing_operators(reference, output).items():
            if operator is not None and edge[0] in reference.producer:
                counterpart = _counterpart(reference, tuned, edge)
                if counterpart is not None:
                    yield _unmeasured(output, edge[0], operator), counterpart


def _unmeasured(output: str, tensor: str, operator: Node) -> TailParity:
    node, kind = operator.name, operator.op_type
    return TailParity(output=output, tensor=tensor, operator=kind, node=node, sqnr_db=0.0, samples=0)


def _counterpart(reference: Model, tuned: Model, edge: Edge) -> str | None:
    """The tensor that an operator of this type reads in the tuned model: the same one, or its dequantized values."""
    tensor, end = edge
    if tensor not in tuned.producer:
        return None

    def readers(name: str) -> list[tuple[Node, int]]:
        return [(tuned.by_name[reader.node], reader.input) for reader in tuned.consumers.get(name, ())]

    quantized = [node.outputs[0] for node, _ in readers(tensor) if node.op_type == "QuantizeLinear"]
    dequantizing = [node for name in quantized for node, _ in readers(name)]
    names = [node.outputs[0] for node in dequantizing if node.op_type == "DequantizeLinear"]
    reads = reference.by_name[end.node].op_type, end.input
    return next(
        (name for name in (*names, tensor) if reads in [(node.op_type, i) for node, i in readers(name)]), None
    )


def _written(
    models: tuple[Model, Model], tails: Sequence[tuple[TailParity, str]], files: tuple[Path, Path]
) -> tuple[Observer, Observer]:
    """The models with the tensors as their only outputs, written to files."""
    reference = observe(models[0], [tail.tensor for tail, _ in tails])
    tuned = observe(models[1], [name for _, name in tails])
    for model, observer, file in zip(models, (reference, tuned), files, strict=True):
        save_model(observer.parts, file, base=require_path(model).parent)
    return reference, tuned


def _compared(
    setup: CaseSetup,
    tails: Sequence[tuple[TailParity, str]],
    observers: tuple[Observer, Observer],
    engines: SideBySide,
) -> tuple[TailParity, ...]:
    """The tensors with their SQNR. Raises `BackendError` if a model cannot be run with them as its outputs."""
    feeds, _ = setup.prepared.comparison_data()
    reference, tuned = observers
    compared, samples = OutputComparison(), 0
    for run in engines.runs(islice(feeds, SAMPLES)):
        expected, seen = reference.seen(run.reference), tuned.seen(run.tuned)
        compared.add(
            {tail.tensor: expected[tail.tensor] for tail, _ in tails},
            {tail.tensor: seen[name] for tail, name in tails},
        )
        samples += 1
    sqnr_db = {found.name: found.sqnr_db for found in compared.results()}
    return tuple(replace(tail, sqnr_db=sqnr_db[tail.tensor], samples=samples) for tail, _ in tails)
