"""Regions derived from the kernels that a runtime fuses."""

from __future__ import annotations

from contextlib import closing

from qdqspec.app.session import Session
from qdqspec.graph.regions.search import groups_of
from qdqspec.types import Case, LayerTime, RegionRules


def layer(*nodes, boundary=False):
    return LayerTime(name="k", op_type="K", milliseconds=1.0, nodes=nodes, boundary=boundary)


def test_a_node_belongs_to_the_first_kernel_that_names_it():
    layers = [layer("a", "b"), layer("b", "c"), layer("c"), layer("d", boundary=True), layer()]
    assert groups_of(layers) == (("a", "b"), ("c",))


def test_regions_by_the_kernels_of_onnx_runtime(tmp_path, models):
    """ONNX Runtime runs Conv, residual Add and Relu as one kernel, which is one region."""
    rules = RegionRules(by="fusion", max_nodes=50)
    case = Case(id="default", model=models / "digits_resnet.onnx", regions=rules)
    with closing(Session(root=tmp_path)) as session:
        leaves = [set(region.nodes) for region in session.regions(case) if region.type == "LEAF"]
    block = "/layer1/layer1.0"
    assert {f"{block}/conv2/Conv", f"{block}/Add", f"{block}/Relu_1"} in leaves
    assert {f"{block}/conv1/Conv", f"{block}/Relu"} in leaves
