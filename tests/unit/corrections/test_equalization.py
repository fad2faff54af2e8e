"""The choice of factors for chains of channels."""

from __future__ import annotations

import numpy as np
import pytest
from chain_models import image_model
from onnx import numpy_helper
from onnx_text import outputs_of
from written_cases import normal

from qdqspec.accuracy.corrections.equalization import WeightSteps, chosen_equalizations
from qdqspec.graph.model import Model
from qdqspec.graph.observe import with_outputs
from qdqspec.qdq.chains import find_chains
from qdqspec.qdq.equalize import equalized

FACTORS = 2.0 ** np.array([4, -3, 0, 2])


def with_factors(model: Model) -> Model:
    """The model with the channels of the first convolution scaled by `FACTORS`, and by the inverse in the next one."""
    proto = model.proto
    for tensor, factors in zip(
        proto.graph.initializer, (FACTORS[:, None, None, None], FACTORS, 1 / FACTORS), strict=False
    ):
        values = numpy_helper.to_array(tensor)
        factors = factors[:, None, None] if tensor.name == "c2" else factors
        tensor.CopyFrom(numpy_helper.from_array((values * factors).astype(np.float32), tensor.name))
    return Model(proto)


def observed(model: Model, tensors: object) -> list[dict[str, np.ndarray]]:
    observer = with_outputs(model, tensors)  # type: ignore[arg-type]
    names = [output.name for output in observer.proto.graph.output]
    runs = (outputs_of(observer.proto, {"x": normal(1, 3, 6, 6, seed=seed)}) for seed in range(4))
    return [observer.seen(dict(zip(names, run, strict=True))) for run in runs]


@pytest.mark.parametrize("per_channel", [True, False])
def test_equalized_channels_have_similar_ranges(per_channel: bool) -> None:
    model = with_factors(image_model(3, ["relu"], "conv"))
    steps = WeightSteps(steps=127, per_channel=frozenset({"c0", "c2"} if per_channel else ()))
    found = chosen_equalizations(model, find_chains(model), steps, lambda each: observed(model, each))
    ((_, change),) = found

    def spread(which: Model) -> float:
        largest = np.max([values["t1"].max(axis=(0, 2, 3)) for values in observed(which, ["t1"])], axis=0)
        return float(largest.max() / largest.min())

    assert spread(model) > 16
    assert spread(equalized(model, [change])) < spread(model) / 4


def test_extremes_of_few_samples_alone_do_not_change_factors() -> None:
    """All channels have the same distribution, with rare large values in different channels of each sample."""
    model = image_model(3, ["relu"], "conv", channels=64)
    random = np.random.default_rng(0)
    values = [random.standard_t(3, (1, 64, 6, 6)).astype(np.float32) for _ in range(8)]
    steps = WeightSteps(steps=127, per_channel=frozenset({"c0", "c2"}))
    assert chosen_equalizations(model, find_chains(model), steps, lambda _: [{"t1": v} for v in values]) == []
