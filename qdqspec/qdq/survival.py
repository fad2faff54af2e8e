"""Checks which Q/DQ pairs of a model survive an optimizer.

A pair has survived for a reader if the reader's kernel in the optimized graph

- computes in integers (QLinearConv and similar, or a Reshape, MaxPool and so on of an integer tensor), or
- still reads a DequantizeLinear of the same scale, at most through converting nodes.

A reader of a tensor's shape does not need a pair, and optimizers fold it: it is skipped. Names of Q and DQ
nodes, of their tensors and even their integer type are not compared: an optimizer may convert int8 to
uint8, duplicate DequantizeLinear nodes, and rename tensors when it changes the layout.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from qdqspec._core import hooks
from qdqspec._core.files import TemporaryFolder
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.graph import Model, Node, fold_constants, load_model, save_model
from qdqspec.graph.ops import COPY_OPS, sources_of
from qdqspec.qdq.pair_numbers import is_op, is_qdq, scale_of
from qdqspec.qdq.recognize import with_constant_numbers
from qdqspec.qdq.strip import INTEGER_KERNELS, FoundPair, StrippedModel
from qdqspec.types import Optimizer, SurvivalEvidence

_MOVES = COPY_OPS | {
    "Concat", "Max", "MaxPool", "Min", "NhwcMaxPool", "ReduceMax", "ReduceMin", "Relu", "Resize", "TopK", "Where",
}  # fmt: skip
_COMPARES = frozenset({"ArgMax", "ArgMin"})  # integers are read, and their positions made
_CONVERTS = frozenset(
    {"ReorderInput", "ReorderOutput", "Transpose", "Reshape", "Cast", "Squeeze", "Unsqueeze", "Identity"}
)
# nodes that change the layout around a kernel
_LAYOUT = frozenset({"ReorderInput", "ReorderOutput", "Transpose"})
_INTEGERS = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16})


def check_survival(model: Path, through: Sequence[Optimizer]) -> tuple[SurvivalEvidence, ...]:
    """Run optimizers on a model file, each on the original, and report the survival of its pairs.

    An optimizer that is not installed, or fails, gives evidence with an ``error``. Raises `ModelError` if the
    model itself cannot be read.
    """
    apart = StrippedModel(load_model(model))
    here = {there: name for name, there in apart.names.items()}  # node names of the model with Q/DQ
    pairs = [pair for pair in apart.pairs if pair.ends]
    evidence = []
    for name in dict.fromkeys(through):
        with TemporaryFolder() as folder:
            try:
                out = run_optimizer(name, model, folder)
            except BackendError as error:
                evidence.append(SurvivalEvidence(optimizer=name, error=error.what, cure=error.cure or ""))
                continue
            owner = hooks.owner_of(name)
            mapping = owner and hooks.declaration_of(owner).kernel_origins
            optimized = with_constant_numbers(Model(onnx.load(str(out), load_external_data=False), path=out))
            after = _After(apart.model, optimized, mapping or hooks.default().kernel_origins)
            results = [(pair, *after.result(pair, here)) for pair in pairs]
        lost = (f"{pair.tensor} > {', '.join(ends)}" for pair, result, ends in results if result == "lost")
        kept, integer = (sum(result == word for _, result, _ in results) for word in ("kept", "integer"))
        evidence.append(SurvivalEvidence(optimizer=name, kept=kept, integer=integer, lost=tuple(lost)))
    return tuple(evidence)


@dataclass
class _After:
    """The optimized graph, seen from the nodes of the original model."""

    source: Model
    model: Model
    mapping: hooks.Hook  # of the runtime whose optimizer made the graph, or of the default one

    def __post_init__(self) -> None:
        self.integers = {n for n, t in self.model.constants.items() if t.data_type in _INTEGERS}
        for node in self.model.nodes:  # topological order
            # the result of a QGemm without an output scale is float
            makes = node.op_type == "QuantizeLinear" or (node.op_type == "QGemm" and any(node.inputs[7:8]))
            if makes or node.op_type.startswith("QLinear") or self._has_integers(node, _MOVES):
                # the second output of others has positions, or a mask
                self.integers.update(node.outputs if node.op_type == "Split" else node.outputs[:1])

    @cached_property
    def kernels(self) -> dict[str, Node]:
        """The kernel that has the name of a node of the source, or makes its output."""
        given = {node.name for node in self.source.nodes if node.proto.name and not is_qdq(node)}
        found = {node.name: node for node in self.model.nodes if node.name in given and not is_qdq(node)}
        for node in self.source.nodes:
            maker = self.model.producer.get(node.outputs[0]) if node.outputs else None
            if maker is not None and maker.op_type not in _LAYOUT and not is_qdq(maker):
                found.setdefault(node.name, maker)
        return found

    @cached_property
    def likely(self) -> dict[str, Node]:
        """The kernel that a node was probably fused into."""
        found: dict[str, Node] = {}
        origins = hooks.load(self.mapping)(self.model.flat.graph, self.source)
        for kernel, origin in zip(self.model.nodes, origins, strict=True):
            for name in origin.nodes:
                found.setdefault(name, kernel)
        return found

    @cached_property
    def needed(self) -> frozenset[str]:
        """The nodes of the source whose values reach a graph output; of others no more than the shape is read."""
        return sources_of(self.source, self.source.outputs)

    def result(self, pair: FoundPair, here: dict[str, str]) -> tuple[str, list[str]]:
        """The result of a pair (``kept``, ``integer`` or ``lost``), and the readers that lost it."""
        results: dict[str, str] = {}
        for end in pair.ends:
            if end.is_output:  # is it still made from integers?
                maker = self.model.producer.get(pair.tensor)
                is_integer = maker is not None and self._reads_integers(maker)
                result = "integer" if is_integer else "lost"
                is_dequantized = maker is not None and is_op(maker, "DequantizeLinear")
                results[f"graph output '{pair.tensor}'"] = "kept" if is_dequantized else result
            elif here[end.node] in self.needed:
                results[f"{end.node}:{end.input}"] = self._judge_reader(pair, here[end.node])
        lost = [reader for reader, result in results.items() if result == "lost"]
        if lost:
            return "lost", lost
        return ("integer" if "integer" in results.values() else "kept"), []

    def _judge_reader(self, pair: FoundPair, name: str) -> str:
        kernel = self.kernels.get(name) or self.likely.get(name)
        if kernel is not None and self._reads_integers(kernel):
            return "integer"
        dequantizers = []
        for tensor in () if kernel is None else kernel.inputs:
            node = self.model.producer.get(tensor)
            while node is not None and node.op_type in _CONVERTS and node.inputs:
                node = self.model.producer.get(node.inputs[0])
            dequantizers += [] if node is None else [node]
        if name not in self.kernels:
            # The reader was removed, such as two Transposes that cancel out. The pair may still exist.
            dequantizers += self.model.nodes
        of_scale = (self._has_same_scale(pair, one) for one in dequantizers if is_op(one, "DequantizeLinear"))
        return "kept" if any(of_scale) else "lost"

    def _reads_integers(self, node: Node) -> bool:
        return node.op_type.startswith(INTEGER_KERNELS) or self._has_integers(node, _MOVES | _COMPARES)

    def _has_integers(self, node: Node, op_types: frozenset[str]) -> bool:
        """Whether a node of these types reads integers."""
        return node.op_type in op_types and any(name in self.integers for name in node.inputs[:1])

    def _has_same_scale(self, pair: FoundPair, dequantize: Node) -> bool:
        """Whether a DequantizeLinear has the pair's scale; a computed one must be the pair's own."""
        if pair.numbers is None or dequantize.inputs[1] not in self.model.constants:
            return dequantize.inputs[0] == pair.quantized
        scale = scale_of(self.model, dequantize).astype(np.float32)
        return scale.tobytes() == pair.numbers.scale.tobytes()


# ---- optimizers: our folding, onnxslim and onnxscript, which are optional, and those of backends --------

Run = Callable[[Path, Path], Path]  # model file, folder to write to; the optimized file


def run_optimizer(name: Optimizer, model: Path, folder: Path) -> Path:
    """Write the model that an optimizer makes of a model into ``folder``.

    Raises `BackendUnavailableError` with installation advice if it is not installed, `BackendError` if it
    fails.
    """
    run: Run = _RUNS.get(name) or hooks.load(hooks.declaration_of(hooks.owner_of(name)).optimizers[name])
    return run(model, folder)


def _fold(model: Path, folder: Path) -> Path:
    out = folder / "folded.onnx"
    save_model(fold_constants(load_model(model)).model.proto, out, base=model.absolute().parent)
    return out


def _run_package(name: str, function: str, model: Path, folder: Path) -> Path:
    """Run a function of a package, if that is installed. Any error of it is a `BackendError` on one line."""
    package = name.partition(".")[0]
    try:
        optimize = getattr(importlib.import_module(name), function)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        what = f"{package} is not installed here" if missing else f"{package} cannot be imported: {error}"
        raise BackendUnavailableError(what, cure=f"pip install {package}") from None
    try:
        optimized = optimize(onnx.load(str(model)))
    except Exception as error:  # noqa: BLE001 - a tool may raise any class
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise BackendError(f"{package} failed on the model: {why}", where=model) from None
    out = folder / "optimized.onnx"
    save_model(optimized, out)
    return out


_RUNS: dict[Optimizer, Run] = {
    "constant-folding": _fold,
    "onnxslim": partial(_run_package, "onnxslim", "slim"),
    "onnxscript": partial(_run_package, "onnxscript.optimizer", "optimize"),
}
