"""The output of `qdqspec inspect`."""

from __future__ import annotations

import json
from dataclasses import replace

import onnx
import pytest
from onnx_text import parsed

from qdqspec._core.registry import resolve
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.regions.inspect import Judged, find_bodies, inspect_model, render_text, to_json
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.space.judging import judge


def judged(model: Model, *able: str) -> Judged:
    """The judgement of a backend that runs these operator types in integers, but no producer of a graph output."""
    reasons = {n.name: "" if n.op_type in able else f"{n.op_type}: it cannot" for n in model.nodes}
    return Judged(
        backend="some", reasons=reasons, outputs=dict.fromkeys(model.outputs, "it is not asked for")
    )


def test_the_texts_and_the_json_of_an_inspection(models, golden):
    """The inspection of ``qdqspec inspect`` without the forecast."""
    model = load_model(models / "digits_resnet.onnx")
    can = resolve("backend", "onnxruntime")().capabilities()
    found = inspect_model(model, find_regions(model), judge(model, can, backend="onnxruntime"))
    golden("regions/digits_resnet.txt", render_text(found))
    golden("regions/digits_resnet-verbose.txt", render_text(found, verbose=True, include_all=True))
    golden("regions/digits_resnet.json", json.dumps(to_json(found), indent=1) + "\n")


def layers(count: int) -> Model:
    """Residual blocks, each followed by a pointwise convolution."""
    layer = (
        "a{0} = Conv(x{0}, w) b{0} = Relu(a{0}) c{0} = Conv(b{0}, w) d{0} = Add(c{0}, x{0}) "
        "e{0} = MaxPool <kernel_shape = [1, 1]> (d{0}) f{0} = Neg(e{0}) x{1} = Sigmoid(f{0})"
    )
    body = " ".join(layer.format(i, i + 1) for i in range(count))
    return parsed(f"g (float[1,4,8,8] x0) => (float[1,4,8,8] x{count}) {{ {body} }}", w=(4, 4, 1, 1))


def test_layers_that_repeat_are_reported_once(golden):
    model = layers(7)
    assert len(model.nodes) == 49
    can = resolve("backend", "onnxruntime")().capabilities()
    found = inspect_model(model, find_regions(model), judge(model, can, backend="onnxruntime"))
    golden("regions/layers.txt", render_text(found))
    assert render_text(found, verbose=True).count("LEAF") > render_text(found).count("LEAF")
    many = layers(300)
    larger = inspect_model(many, find_regions(many), judge(many, can, backend="onnxruntime"))
    assert len(render_text(larger).splitlines()) == len(render_text(found).splitlines())


def test_long_lists_are_truncated_and_regions_with_nothing_to_quantize_omitted_in_text(models):
    model = load_model(models / "ultraface_rfb320.onnx")
    regions = find_regions(model)
    why = {"scores": "Softmax cannot", "boxes": ""}
    found = inspect_model(model, regions, replace(judged(model, "Softmax"), outputs=why))
    text = render_text(found)
    assert text.count("LEAF") < render_text(found, include_all=True).count("LEAF")
    assert "--include-all shows them" in text
    assert "1        scores     Softmax cannot" in text
    assert "boxes" not in text.partition("Graph outputs that stay float")[2]
    assert {row["tensor"]: row["reason"] for row in to_json(found)["outputs"]} == why
    found = inspect_model(model, regions)
    text = render_text(found, lines=3)
    assert f"... and {len(found.regions) - 3} more" in text
    assert len(text.splitlines()) < 40
    assert len(to_json(found)["regions"]) == len(found.regions)


NESTED = """<ir_version: 8, opset_import: ["": 17, "local": 1]>
g (float[1,4,8,8] x, bool c) => (float[1,4,8,8] y)
<float[4,4,1,1] w = {1,0,0,0, 0,1,0,0, 0,0,1,0, 0,0,0,1}> {
    [pre] a = Conv(x, w)
    [choose] y = If (c) <
        then_branch = t () => (float[1,4,8,8] p) {
            [conv] q = Conv(a, w)
            [again] p = If (c) <
                then_branch = u () => (float[1,4,8,8] r) { [relu] r = Relu(q) },
                else_branch = v () => (float[1,4,8,8] s) { [neg] s = Neg(a) }
            >
        },
        else_branch = e () => (float[1,4,8,8] z) { [call] z = local.twice(a) }
    >
}
<domain: "local", opset_import: ["": 17]> twice (f) => (h) { [add] h = Add(f, f) }"""


@pytest.fixture
def nested():
    return Model(onnx.parser.parse_model(NESTED))


def test_bodies_are_regions_of_the_tree_and_functions_separate_graphs(nested):
    bodies = find_bodies(nested, find_regions(nested), find_regions)
    leaves = {b.name: [n for r in b.regions if r.type == "LEAF" for n in r.nodes] for b in bodies}
    assert leaves == {
        "choose/then_branch": ["choose/then_branch/conv", "choose/then_branch/again"],
        "choose/then_branch/again/then_branch": ["choose/then_branch/again/then_branch/relu"],
        "choose/then_branch/again/else_branch": ["choose/then_branch/again/else_branch/neg"],
        "choose/else_branch": ["choose/else_branch/call"],
        "local:twice": ["local:twice/add"],
    }
    regions = {region.id: region for region in find_regions(nested)}
    assert {(r.parent, r.nodes) for r in regions.values() if r.type == "LEAF"} == {
        ("r0", ("pre", "choose")),
        ("r0.1", ("choose/then_branch/conv", "choose/then_branch/again")),
        ("r0.1", ("choose/then_branch/again/then_branch/relu",)),
        ("r0.1", ("choose/then_branch/again/else_branch/neg",)),
        ("r0", ("choose/else_branch/call",)),
    }


def test_bodies_are_listed_and_functions_are_not_quantized(nested):
    regions = find_regions(nested)
    found = inspect_model(
        nested,
        regions,
        judged(nested, "Conv"),
        bodies=find_bodies(nested, find_regions(nested), find_regions),
    )
    text = render_text(found)
    assert "nothing is placed in local functions" in text
    assert "quantizable on some: 2 of 7 nodes" in text
    assert "choose/then_branch/again/else_branch" in text
    placed = {body["name"]: body["placed"] for body in to_json(found)["bodies"]}
    assert [name for name, is_placed in placed.items() if not is_placed] == ["local:twice"]
    assert "and 4 more" in render_text(found, lines=1)


def test_long_names_of_bodies_are_shortened_in_text_and_complete_in_json():
    renamed = Model(onnx.parser.parse_model(NESTED.replace("[choose]", f"[{'deep_' * 20}choose]")))
    regions = find_regions(renamed)
    bodies = find_bodies(renamed, regions, find_regions)
    found = inspect_model(renamed, regions, judged(renamed, "Conv"), bodies=bodies)
    table = render_text(found).partition("Bodies of If, Loop and Scan")[2].partition("\n\n")[0]
    names = [line.split()[3] for line in table.splitlines()[3:] if line.startswith("body")]
    assert max(map(len, names)) == 60
    for body, name in zip(bodies, names, strict=False):
        head, tail = name.split("...")
        assert body.name.startswith(head)
        assert body.name.endswith(tail)
    assert {body["name"] for body in to_json(found)["bodies"]} == {body.name for body in bodies}
