"""Equalized models compute the same bits, and their constants can be restored bit for bit."""

from __future__ import annotations

import numpy as np
from chain_models import ENDS, IMAGE_STEPS, TOKEN_STEPS, image_model, token_model
from hypothesis import given, settings, strategies as st
from onnx_text import outputs_of
from random_models import random_inputs

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
    feeds = random_inputs(model)
    both = (outputs_of(each, feeds, "ENABLE_ALL") for each in (model, other))
    for one, two in zip(*both, strict=True):
        np.testing.assert_array_equal(one, two)
    assert equalizations_of(other.flat, other.constants) == tuple(changes)
    assert restored(other.proto).SerializeToString() == model.proto.SerializeToString()
