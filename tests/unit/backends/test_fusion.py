"""Regions that follow what a runtime fuses: from a file, or from one build in float16."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest

from qdqspec.app.session import Session
from qdqspec.errors import StateError
from qdqspec.types import Case, RegionRules, TuneRules

pytestmark = pytest.mark.usefixtures("engine_threads")
Install = Callable[[str], None]
MODEL = "digits_resnet_b1.onnx"


@pytest.fixture
def case(models: Path, tmp_path: Path) -> Case:
    proto = onnx.load(models / "digits_resnet.onnx")
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(proto, tmp_path / MODEL)
    return Case(
        id="default", model=tmp_path / MODEL, regions=RegionRules(by="fusion"), tune=TuneRules(trials=2)
    )


def leaves(session: Session, case: Case) -> set[tuple[str, ...]]:
    return {region.nodes for region in session.regions(case) if region.type == "LEAF"}


def builds(folder: Path) -> list[str]:
    """The models that the fake TensorRT built, by name."""
    lines = [json.loads(line) for line in (folder / "builds.jsonl").read_text().splitlines()]
    return [line["model"] for line in lines if "plan_bytes" in line]


def test_fusions_are_read_from_one_build_in_float16(case: Case, tmp_path: Path, install_tensorrt: Install):
    install_tensorrt("10.16.1.11")
    with Session(backend="tensorrt", root=tmp_path, layout="") as session:
        found = leaves(session, case)
        assert leaves(session, case) == found
    assert builds(tmp_path / "reports" / "tensorrt") == ["half.onnx"]
    assert any(len(nodes) > 1 for nodes in found)


def test_a_model_that_cannot_be_float16_is_built_in_float32(
    case: Case, tmp_path: Path, newest: None, monkeypatch: pytest.MonkeyPatch
):
    from onnxruntime.transformers import float16

    monkeypatch.setattr(float16, "convert_float_to_float16", lambda *_, **__: 1 / 0)
    with Session(backend="tensorrt", root=tmp_path, layout="") as session:
        assert any(len(nodes) > 1 for nodes in leaves(session, case))
        (warning,) = [w for w in session.work(case).prepared.warnings if "fusions" in w]
    assert "a build of the given model, not of its float16 form: it cannot be" in warning
    assert builds(tmp_path / "reports" / "tensorrt") == [MODEL]


def test_a_file_of_fusions_replaces_the_build(case: Case, tmp_path: Path):
    """The file is one that trtexec exports; the backend is ONNX Runtime, which builds nothing for this."""
    names = [node.name for node in onnx.load(case.model).graph.node]
    groups = [names[0:3], names[3:5]]
    metadata = ["\x1e".join(f"[ONNX Layer: {name}]" for name in group) for group in groups]
    layers = [{"Name": f"k{index}", "Metadata": text} for index, text in enumerate(metadata)]
    graph = tmp_path / "engine.graph.json"
    graph.write_text(json.dumps({"Layers": [*layers, "of another model"], "Bindings": []}))
    told = replace(case, regions=RegionRules(by="fusion", graph=graph))
    with Session(backend="onnxruntime", root=tmp_path) as session:
        found = leaves(session, told)
        assert {tuple(group) for group in groups} <= found
        assert session.work(told).prepared.fused == tuple(map(tuple, groups))
        key = session.work(told).prepared.key
    graph.write_text(graph.read_text().replace("k0", "k9"))
    with Session(backend="onnxruntime", root=tmp_path) as session:
        assert session.work(told).prepared.key != key, "another file is another search"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be used: it is not JSON"),
        ('{"Layers": ["Conv_0 + Relu_1"]}', "no layer in it names a node of"),
        (None, "it cannot be read: No such file"),
    ],
)
def test_a_file_of_fusions_of_another_model_or_a_missing_one_is_an_error(
    case: Case, tmp_path: Path, text: str | None, said: str
):
    graph = tmp_path / "engine.graph.json"
    if text is not None:
        graph.write_text(text)
    told = replace(case, regions=RegionRules(by="fusion", graph=graph))
    with (
        Session(backend="onnxruntime", root=tmp_path) as session,
        pytest.raises(StateError, match=said) as caught,
    ):
        session.regions(told)
    assert caught.value.where == str(graph)
    assert "--exportLayerInfo" in str(caught.value.cure)
