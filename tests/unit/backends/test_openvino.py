"""The OpenVINO backend: no telemetry, failures with reasons, pinned settings, kernels in ONNX names, operator table."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from installed import require
from operator_models import IMAGE, MATRIX, ONE, Graph, conv, indices, layers_of, runs_in_integers

from qdqspec.app.cli import main
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.openvino import engine as table
from qdqspec.backends.openvino.engine import OpenVino, OpenVinoEngine
from qdqspec.graph.model import load_model
from qdqspec.testing.backends import small_model

FEEDS = {"x": np.ones((1, 3, 8, 8), np.float32)}

# Run in another interpreter: threads and processes that the import starts are visible only there.
IMPORTED = """
import json, os, sys, threading
from pathlib import Path
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.openvino.engine import OpenVino
OpenVino().probe()
OpenVino().build(Path(sys.argv[1]), BuildOptions()).close()
from openvino.tools.ovc import telemetry_utils
children = Path(f"/proc/self/task/{os.getpid()}/children")
print(json.dumps({
    "loaded": [name for name in sys.modules if name.startswith("openvino_telemetry")],
    "used": telemetry_utils.tm.__name__,
    "threads": threading.active_count(),
    "children": children.read_text() if children.exists() else "",
}))
"""


@pytest.fixture(autouse=True)
def installed() -> None:
    require("openvino")


def build(path: Path, model: onnx.ModelProto, **options: object) -> OpenVinoEngine:
    onnx.save(model, path)
    return OpenVino().build(path, BuildOptions(**options))  # type: ignore[arg-type]


def test_no_telemetry_is_started(tmp_path: Path) -> None:
    """Package openvino_telemetry would start a thread and a process, which send over the network."""
    onnx.save(small_model(), tmp_path / "m.onnx")
    command = [sys.executable, "-c", IMPORTED, str(tmp_path / "m.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"loaded": [], "used": "openvino.tools.ovc.telemetry_stub", "threads": 1, "children": ""}


def test_a_missing_device_is_named() -> None:
    availability = OpenVino().probe(BuildOptions(extra={"openvino.device": "npu"}))
    if availability.usable:
        pytest.skip("this machine has an NPU")
    assert "no device NPU" in availability.why


def test_arithmetic_and_threads_are_pinned(tmp_path: Path) -> None:
    engine = build(tmp_path / "small.onnx", small_model())
    wanted = {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": 1, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    assert {name: int(engine._native.get_property(name)) for name in wanted} == wanted
    assert engine._native.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"
    assert table.properties(BuildOptions(threads=2))["INFERENCE_NUM_THREADS"] == 2
    engine.bind(FEEDS)
    default = table.import_openvino().Core().get_property("CPU", "INFERENCE_PRECISION_HINT").to_string()
    (*notes,) = engine.time(1).notes
    assert [f"default here is {default}" in note for note in notes] == [True] * (default != "f32")


def test_a_relu_replaced_by_the_quantization_belongs_to_the_kernel_of_its_convolution(tmp_path: Path) -> None:
    """Names with commas and slashes are found; those of pairs do not change the hash of the graph."""
    model = small_model(quantized=True)
    original = build(tmp_path / "original.onnx", model).graph_hash
    for node in model.graph.node:
        if node.op_type.endswith("Linear"):
            node.name = f"other_{node.name}"
    assert build(tmp_path / "other.onnx", model).graph_hash == original
    for node in model.graph.node:
        node.name = f"/net/block,{node.name}/x"
    engine = build(tmp_path / "small.onnx", model)
    engine.bind(FEEDS)
    layers = engine.layers()
    (convolution,) = [layer for layer in layers if "/net/block,conv/x" in layer.nodes]
    assert convolution.nodes == ("/net/block,conv/x", "/net/block,relu/x")
    assert (convolution.integer, convolution.precision) == (True, "uint8")
    boundary = next(layer for layer in layers if layer.boundary)
    assert (boundary.op_type, boundary.tensors) == ("QuantizeLinear", ("x",))
    assert not next(layer for layer in layers if "/net/block,gemm/x" in layer.nodes).integer


def test_a_kernel_named_after_the_pair_before_it_computes_none_of_the_nodes_of_others(tmp_path: Path) -> None:
    """A LayerNormalization begins with a Reduce that OpenVINO names after the pair in front."""
    g = Graph()
    x = g.node("Conv", g.input((1, 8, 8, 8)), g.weight(8, 8, 3, 3, axis=0))
    moved = g.pair(g.node("Transpose", x, perm=[0, 2, 3, 1]), zero=0, dtype=np.int8)
    y = g.node("LayerNormalization", moved, g.const(np.ones(8), np.float32))
    layers = layers_of(OpenVino(), g.model(y), tmp_path)
    assert [layer.op_type for layer in layers if layer.nodes == ("n4",)] == ["Transpose"]


@pytest.mark.parametrize("name", ["squeezenet10", "digits_resnet"])
def test_kernels_of_a_real_model_name_its_operators(models: Path, name: str) -> None:
    path = models / f"{name}.onnx"
    engine = OpenVino().build(path, BuildOptions())
    shape = engine._native.inputs[0].partial_shape.get_min_shape()
    engine.bind({engine._inputs[0]: np.zeros([size or 1 for size in shape], np.float32)})
    named = [node for layer in engine.layers(2) for node in layer.nodes]
    heavy = {n.name for n in load_model(path).nodes if n.op_type in ("Conv", "Gemm", "MaxPool", "Relu")}
    assert heavy <= {*named}


SPEC = """qdqspec: 1
model: digits_resnet.onnx
inputs: {shapes: {input: [2, 1, 16, 16]}}
regions: {by: fusion}
tune: {trials: 2, min_sqnr_db: none}
checks:
  - {kind: size, max_ratio: 1.0}
"""


@pytest.mark.usefixtures("hasty")
def test_a_search_on_a_real_model_builds_integer_kernels(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regions follow what OpenVINO fuses; candidates are built and timed in separate processes."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(models / "digits_resnet.onnx", tmp_path)
    (tmp_path / "net.qdq.yaml").write_text(SPEC)
    assert main(["tune", "net.qdq.yaml", "--backend", "openvino", "-o", "out", "--no-cache"]) == 0
    (journal,) = (tmp_path / "out").rglob("trials.jsonl")
    trials = [json.loads(line) for line in journal.read_text().splitlines()]
    built = [trial for trial in trials if "status" in trial]
    assert {trial["status"] for trial in built} == {"ok"}
    integer = {layer["op_type"] for trial in built for layer in trial.get("layers", ()) if layer["integer"]}
    assert "Convolution" in integer


# ---- the operator table: one small model per entry, and the precision of its kernels ---------------


Maker = Callable[[Graph, str], str]

# op type -> the operator on quantized inputs, for those that the table of ONNX Runtime does not have
MORE: dict[str, Maker] = {
    "GlobalMaxPool": lambda g, x: g.node("GlobalMaxPool", x),
    "ReduceMax": lambda g, x: g.node("ReduceMax", x, indices(g, 2, 3)),
    "ReduceMean": lambda g, x: g.node("ReduceMean", x, indices(g, 2, 3)),
    "ReduceSum": lambda g, x: g.node("ReduceSum", x, indices(g, 2, 3)),
}
# those that are computed in the kernel of a convolution, or of operands of the same kind
JOINED: dict[str, Maker] = {
    "Add": lambda g, x: g.node("Add", g.pair(conv(g, x)), g.pair(conv(g, x))),
    "Mul": lambda g, x: squeeze_and_excitation(g, x),
    "Sub": lambda g, x: g.node("Sub", g.pair(conv(g, x)), g.pair(conv(g, x))),
}
ABSORBED: dict[str, Maker] = {
    **{op: (lambda g, x, op=op: g.node(op, x)) for op in table.ABSORBED},
    "BatchNormalization": lambda g, x: g.node(
        "BatchNormalization", x, *(g.const(np.full(8, v), np.float32) for v in (1.1, 0.2, 0.1, 1.3))
    ),
    "Clip": lambda g, x: g.node("Clip", x, g.const(0, np.float32), g.const(6, np.float32)),
    "PRelu": lambda g, x: g.node("PRelu", x, g.const(np.full((8, 1, 1), 0.1), np.float32)),
}


def squeeze_and_excitation(g: Graph, x: str) -> str:
    y = g.pair(conv(g, x))
    gate = g.node("Sigmoid", g.node("GlobalAveragePool", y))
    return g.node("Mul", y, g.pair(gate, zero=0, scale=1 / 255))


@pytest.mark.parametrize(
    ("op", "out"), [(op, kind == "in+out") for op in sorted(table.LABELS) for kind in table.LABELS[op]]
)
def test_an_operator_runs_in_integers_under_each_of_its_labels(tmp_path: Path, op: str, out: bool) -> None:
    g = Graph()
    x = g.input(MATRIX if op in ("Gemm", "MatMul") else IMAGE)
    outputs = [{**ONE, **MORE, **JOINED}[op](g, x), *g.others]
    model = g.model(*(g.pair(y) if out else y for y in outputs))
    assert runs_in_integers(OpenVino(), model, tmp_path, op)


@pytest.mark.parametrize("op", sorted(table.ABSORBED))
def test_operators_that_a_convolution_absorbs_are_computed_in_its_kernel(tmp_path: Path, op: str) -> None:
    """The kernel of the convolution includes the operator and writes integers; no other kernel computes."""
    g = Graph()
    y = ABSORBED[op](g, conv(g, g.input(IMAGE)))
    model = g.model(conv(g, g.pair(y, zero=100)), opset=20)
    computing = [layer for layer in layers_of(OpenVino(), model, tmp_path) if not layer.boundary]
    assert [layer.op_type for layer in computing] == ["Convolution", "Convolution"]
    first = computing[0]
    assert first.precision == "uint8"
    assert {node.op_type for node in model.graph.node if node.name in first.nodes} == {"Conv", op}
