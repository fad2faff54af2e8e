"""Each lint rule for TensorRT for RTX: a model that breaks it, and a similar one that does not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from trt_corpus import CASES, FP8, IMPORTED, NEWER, QX, ROWS, RTX_CASES, parse

from qdqspec.graph.model import Model
from qdqspec.qdq.lint import lint_model, rules_for

TARGET = "tensorrt-rtx-1"
HELD = tuple(rule.id for rule in rules_for(TARGET))


def ids(model: Model, **options: tuple[int, int]) -> set[str]:
    return {finding.id for finding in lint_model(model, TARGET, **options)}


@pytest.mark.parametrize("name", [name for name in HELD if name in CASES | RTX_CASES])
def test_one_model_breaks_the_rule_and_a_similar_one_does_not(name: str) -> None:
    (inputs, nodes, constants), good = (CASES | RTX_CASES)[name]
    opset = NEWER.get(name, 21)
    assert name in ids(parse(inputs, "y", nodes, opset, **constants))
    inputs, nodes, constants = good
    assert name not in ids(parse(inputs, "y", nodes, opset, **constants))


def test_every_rule_has_a_model() -> None:
    assert set(HELD) - (CASES | RTX_CASES).keys() == {"TRT020", "TRT067"}
    assert all(
        rule.source.startswith("measured with TensorRT for RTX 1.7.1.116") for rule in rules_for(TARGET)
    )


@pytest.mark.parametrize(
    ("numbers", "first"), [({}, (7, 5)), (FP8, (8, 9)), ({"z": np.zeros((), ml_dtypes.int4)}, (8, 0))]
)
def test_a_format_is_refused_below_its_compute_capability(
    numbers: dict[str, np.ndarray], first: tuple[int, int]
) -> None:
    model = parse(ROWS, "y", QX + "y = Neg(a)", **numbers)
    assert "TRT020" not in ids(model, compute_capability=first) | ids(model)
    below = (first[0], first[1] - 1) if first[1] else (first[0] - 1, 5)
    (found,) = [f for f in lint_model(model, TARGET, compute_capability=below) if f.id == "TRT020"]
    assert found.severity == "refused"


@pytest.mark.parametrize("op", IMPORTED)
def test_operators_of_onnx_runtime_are_reported_if_they_need_a_plugin(op: str) -> None:
    broken, (inputs, nodes, constants) = IMPORTED[op]
    assert ids(parse(inputs, "y", nodes, **constants)) == broken
