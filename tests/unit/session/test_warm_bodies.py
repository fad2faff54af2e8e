"""Pattern caches of networks in the body of an If."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from qdqspec.app.preparation.start import Start, warm_starts
from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.model import Model
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.scheme.cache import gather, write_cache
from qdqspec.qdq.space.search_space import SchemeSpace
from qdqspec.types import Placement, Trial

HERE = ("onnxruntime-cpu", "this-machine")
NETWORK = """[{n}0] {n}a = Conv<pads = [1,1,1,1]>(x, w0) [{n}1] {n}b = Relu({n}a)
    [{n}2] {n}d = Conv<pads = [1,1,1,1]>({n}b, w1) [{n}3] {n}e = Relu({n}d)
    [{n}4] {n}f = MaxPool<kernel_shape = [2,2], strides = [2,2]>({n}e)
    [{n}5] {n}h = Conv<pads = [1,1,1,1]>({n}f, w2) [{n}6] {out} = Sigmoid({n}h)"""
IN_A_BODY = """g (float[1,8,8,8] x, bool c) => (float[1,8,4,4] y) {{ [{n}choice] y = If (c) <
    {first} = t () => (float[1,8,4,4] p) {{ {network} }},
    {second} = e () => (float[1,8,4,4] q) {{ k = Tanh(x) q = AveragePool<kernel_shape = [2,2], strides = [2,2]>(k) }}
> }}"""
BRANCHES = ("then_branch", "else_branch")


def space_of(text: str, seed: int) -> SchemeSpace:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    random = np.random.default_rng(seed)
    for name in ("w0", "w1", "w2"):
        weight = random.normal(size=(8, 8, 3, 3)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(weight, name))
    model = Model(proto)
    return SchemeSpace(model, backend().capabilities(), regions=find_regions(model))


def in_a_body(name: str, seed: int, branches: tuple[str, str] = BRANCHES) -> SchemeSpace:
    first, second = branches
    network = NETWORK.format(n=name, out="p")
    return space_of(IN_A_BODY.format(n=name, network=network, first=first, second=second), seed)


def in_the_main_graph(name: str, seed: int) -> SchemeSpace:
    network = NETWORK.format(n=name, out="y")
    return space_of(f"g (float[1,8,8,8] x) => (float[1,8,4,4] y) {{ {network} }}", seed)


SPACES = {
    "body": in_a_body("other", 1),
    "other branch": in_a_body("other", 1, (BRANCHES[1], BRANCHES[0])),
    "main graph": in_the_main_graph("main", 2),
}


def one_conv(space: SchemeSpace, which: str) -> Placement:
    """The placement with only this convolution quantized, which is no pure labelling."""
    (unit,) = (unit for unit in space.units if unit.id.endswith(which))
    return space.resolve({unit.id: unit.full})


@pytest.mark.parametrize("which", ["0", "2"])
@pytest.mark.parametrize("target", SPACES)
@pytest.mark.parametrize("source", SPACES)
def test_the_winner_of_a_network_is_a_warm_start_at_another_nesting(
    tmp_path: Path, source: str, target: str, which: str
) -> None:
    known = in_a_body("first", 0) if source == "body" else SPACES[source]
    trial = Trial(number=0, phase="refine", placement=one_conv(known, which), ratio=0.5)
    path = tmp_path / "patterns.yaml"
    write_cache(path, gather([trial], known, *HERE))
    notes: list[str] = []
    space = SPACES[target]
    first = warm_starts([path], Start(space=space, backend=HERE[0], device=HERE[1], note=notes.append))[0]
    assert notes == []
    expected = one_conv(space, which)
    quantized = {end.node for site in first.sites for end in site.consumers}
    assert {end.node for site in expected.sites for end in site.consumers} <= quantized
    inside = {node.name for node in space.model.nodes if node.op_type in ("Conv", "MaxPool")}
    assert {site for site in first.sites if site.consumers[0].node in inside} == {
        site for site in expected.sites if site.consumers[0].node in inside
    }
