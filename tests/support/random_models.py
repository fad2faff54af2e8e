"""Hypothesis strategies for random valid ONNX models, and placements on them.

For property tests of code that reads or changes models. The models are small and unusual on purpose:
branches, residuals, shared initializers, `Constant` nodes, parts in other types, computed shapes, names that are
missing, repeated or similar to those of inserted Q/DQ, bodies of If, Loop and Scan, some of which read
outer tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import onnx
from hypothesis import strategies as st
from model_draft import ModelDraft
from onnx import TensorProto
from weights import floating

from qdqspec.graph.model import Model
from qdqspec.graph.ops import reads_data
from qdqspec.qdq.formats import number_format
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.types import Consumer, Placement, Site

MODES = st.sampled_from(("integer", "float"))  # of inserting weights


@st.composite
def onnx_models(
    draw: st.DrawFn,
    *,
    max_nodes: int = 8,
    opsets: Sequence[int] = tuple(range(13, 22)),
    bodies: bool = True,
    repeated_names: bool = False,
) -> onnx.ModelProto:
    """A valid model with one or two float32 inputs, ``max_nodes`` groups of one or a few operators, and static shapes.

    It passes ``onnx.checker`` with shape inference and runs in ONNX Runtime, except that ``repeated_names``
    gives nodes the same name, which ONNX allows and ONNX Runtime rejects. ``bodies=False`` omits If, Loop and
    Scan.
    """
    names = ("twice", "") if repeated_names else ("",)
    build = ModelDraft(draw, opset=draw(st.sampled_from(list(opsets))), odd_names=names)
    build.add_input((1, 4, 6, 6))
    if draw(st.booleans()):
        build.add_input((3, 8))
    for _ in range(draw(st.integers(1, max_nodes))):
        build.add_node(bodies)
    return build.model()


@st.composite
def placements(
    draw: st.DrawFn,
    model: Model,
    *,
    activations: Sequence[str] = ("uint8", "int8"),
    weights: Sequence[str] = ("int8",),
) -> Placement:
    """A placement that fits the model: sites on float activations and on constants that operators read as data.

    Consumers of a tensor may be omitted, or split over several sites of different formats; those of a site
    are in one graph of the model. Graph outputs that a node computes are consumers as well. Constants without
    an axis stay float if a format is blocked.
    """
    sites: list[Site] = []
    for tensor in dict.fromkeys((*model.consumers, *model.outputs)):
        weight = tensor in model.constants
        rank = len(model.shape(tensor) or ())
        computed = tensor in model.producer and not weight
        ends = model.ends(tensor) if computed else model.consumers.get(tensor, ())
        read = ends if not weight else tuple(end for end in ends if reads_data(model, end))
        formats = [f for f in (weights if weight else activations) if rank > 1 or not number_format(f).block]
        if model.elem_type(tensor) != TensorProto.FLOAT or not read or not formats:
            continue
        for group in (part for some in draw(_groups(read)) for part in by_graph(model, some)):
            fmt = draw(st.sampled_from(formats))
            whole = [] if number_format(fmt).block else [None]
            axis = draw(st.sampled_from([*whole, *range(rank)])) if weight else None
            sites.append(Site(tensor=tensor, consumers=group, format=fmt, axis=axis, weight=weight))
    return Placement(sites=frozenset(sites))


@st.composite
def placed_models(draw: st.DrawFn, *, odd: bool = True, **kinds: Sequence[str]) -> tuple[Model, Placement]:
    """A model and a placement that fits it. Odd models have repeated node names, which ONNX Runtime rejects."""
    model = Model(draw(onnx_models(repeated_names=odd)))
    return model, draw(placements(model, **kinds))


def ranges_for(model: Model) -> dict[str, TensorRange]:
    """A plausible range for each float tensor, like calibrated ones; deterministic for a model."""
    names = sorted(name for name in model.types if model.elem_type(name) == TensorProto.FLOAT)
    return {name: TensorRange(-1.0 - index % 3, 2.0 + index % 5) for index, name in enumerate(names)}


def random_inputs(model: Model, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """One input per name for a model with static float32 inputs."""
    random = np.random.default_rng(seed)
    shapes = {name: [d or 1 for d in model.shape(name) or ()] for name in model.inputs}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def bytes_of(proto: onnx.ModelProto) -> bytes:
    """The model as bytes that are the same for equal models."""
    return proto.SerializeToString(deterministic=True)


def quantized_model(model: Model, placement: Placement, mode: str = "integer") -> Model:
    """The model with the pairs of a placement, its weights stored as integers or left ``float``."""
    numbers, floats = Quantizer(model, ranges_for(model)), floating(placement.sites, mode)
    return Model(insert_qdq(model, placement, numbers, floating=floats).proto)


def by_graph(model: Model, ends: tuple[Consumer, ...]) -> list[tuple[Consumer, ...]]:
    """Consumers of a tensor for each graph whose nodes they are."""
    found: dict[str, list[Consumer]] = {}
    for end in ends:
        found.setdefault("" if end.is_output else model.by_name[end.node].scope, []).append(end)
    return [tuple(some) for some in found.values()]


@st.composite
def _groups(draw: st.DrawFn, ends: tuple[Consumer, ...]) -> list[tuple[Consumer, ...]]:
    """Disjoint groups of consumers; those of group 0 stay float."""
    if draw(st.booleans()):
        return [ends]
    choice = draw(st.lists(st.integers(0, 2), min_size=len(ends), max_size=len(ends)))
    split = [tuple(e for e, c in zip(ends, choice, strict=True) if c == group) for group in (1, 2)]
    return [group for group in split if group]
