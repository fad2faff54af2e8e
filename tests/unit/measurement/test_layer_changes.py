"""Differences between the kernels of two versions, in names of ONNX nodes."""

from __future__ import annotations

from qdqspec.app.evidence.explained import layer_changes, median_layers, steady_changes
from qdqspec.types import LayerTime


def kernel(ms: float, *nodes: str, op: str = "Conv", integer: bool = False, precision: str = "") -> LayerTime:
    kind = {"integer": integer, "precision": precision}
    return LayerTime(name="_".join(nodes), op_type=op, milliseconds=ms, nodes=nodes, **kind)


def conversion(ms: float, tensor: str) -> LayerTime:
    return LayerTime(name="r", op_type="Reorder", milliseconds=ms, tensors=(tensor,), boundary=True)


OLD = (kernel(1.0, "conv1", "relu1"), kernel(1.0, "conv2"), kernel(0.5, "add", op="Add"))


def test_kernels_of_another_name_or_order_with_the_same_nodes_are_the_same():
    new = tuple(
        LayerTime(name="x", op_type=k.op_type, milliseconds=k.milliseconds, nodes=k.nodes) for k in OLD
    )
    assert layer_changes(OLD, new[::-1]) == ()


def test_a_kernel_that_falls_back_to_float_changes_its_precision_and_time():
    old = (kernel(0.4, "conv1", integer=True, precision="int8"), OLD[1])
    (change,) = layer_changes(old, (kernel(1.0, "conv1", precision="f32"), OLD[1]))
    assert change.kinds == ("precision", "time")
    assert change.before == ("Conv (conv1), int8",)
    assert change.after == ("Conv (conv1), f32",)


def test_a_new_conversion_is_a_change_of_fusion_and_names_its_tensor():
    (change,) = layer_changes(OLD, (*OLD, conversion(0.01, "y")))
    assert change.kinds == ("fusion",)
    assert (change.nodes, change.tensors, change.before) == ((), ("y",), ())


def test_small_changes_of_time_are_not_listed():
    assert layer_changes(OLD, (kernel(1.2, "conv1", "relu1"), *OLD[1:])) == ()  # 20 %
    tiny = (*OLD, kernel(0.01, "tiny"))
    assert layer_changes(tiny, (*OLD, kernel(0.05, "tiny"))) == ()  # 1.6 % of the model
    (change,) = layer_changes(OLD, (kernel(1.3, "conv1", "relu1"), *OLD[1:]))
    assert change.kinds == ("time",)


def test_a_change_of_time_that_another_pair_of_builds_does_not_confirm_is_noise():
    slow = (kernel(1.5, "conv1", "relu1"), *OLD[1:])
    assert steady_changes((OLD, OLD), (slow, OLD)) == ()
    assert steady_changes((OLD, slow), (slow, OLD)) == ()  # opposite signs
    (change,) = steady_changes((OLD, OLD), (slow, slow))
    assert change.kinds == ("time",)


def test_the_median_of_profiles_is_taken_kernel_by_kernel():
    profiles = [(kernel(ms, "a"), kernel(10 * ms, "b")) for ms in (1.0, 9.0, 2.0)]
    assert [layer.milliseconds for layer in median_layers(profiles)] == [2.0, 20.0]
