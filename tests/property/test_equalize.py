"""Equalized models compute the same bits, and their constants can be restored bit for bit."""

from __future__ import annotations

import numpy as np
import onnxruntime
from chain_models import ENDS, IMAGE_STEPS, TOKEN_STEPS, image_model, token_model
from hypothesis import given, settings
from hypothesis import strategies as st

from qdqspec.graph.model import Model
from qdqspec.qdq.chains import find_chains
from qdqspec.qdq.equalize import equalizations_of, equalized, misfit_of, restored

IMAGES = st.builds(
    image_model,
    st.integers(0, 2**16),
    st.lists(st.sampled_from(IMAGE_STEPS), max_size=6),
    st.sampled_from(ENDS),
)
TOKENS = st.builds(
    token_model,
    st.integers(0, 2**16),
    st.lists(st.sampled_from(TOKEN_STEPS), max_size=5),
    st.sampled_from(ENDS[:3]),
)


def outputs(model: Model, seed: int) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(
        model.proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (value,) = session.get_inputs()
    feed = np.random.default_rng(seed).standard_normal(value.shape).astype(np.float32)
    return list(session.run(None, {value.name: feed}))


@settings(max_examples=60, deadline=None)
@given(IMAGES | TOKENS, st.data())
def test_equalized_models_compute_the_same_bits_and_are_restored(model: Model, data: st.DataObject) -> None:
    chains = find_chains(model)
    assert chains
    changes = [
        chain.by(
            data.draw(
                st.lists(st.integers(-8, 8), min_size=chain.channels, max_size=chain.channels), "exponents"
            )
        )
        for chain in chains
    ]
    assert misfit_of(model, changes) is None
    other = equalized(model, changes)
    for one, two in zip(outputs(model, 0), outputs(other, 0), strict=True):
        np.testing.assert_array_equal(one, two)
    assert equalizations_of(other.flat, other.constants) == tuple(changes)
    assert restored(other.proto).SerializeToString() == model.proto.SerializeToString()
