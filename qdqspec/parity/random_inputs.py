"""Random inputs, for models without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from qdqspec.arrays import Array, Shape
from qdqspec.graph.model import Model
from qdqspec.parity.shapes import InputSpec, input_specs

# upper bound of integers, unless the model indicates an index range: suits masks and segment numbers
_FEW = 2
_SAME_VALUES = frozenset(
    {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomFeeds:
    """The same seeded inputs in each pass; ``random`` is always true."""

    seed: int
    count: int
    random: bool = True
    labels: None = None
    _inputs: Mapping[str, tuple[InputSpec, int]]  # with the upper bound of integers for each

    @property
    def notes(self) -> tuple[str, ...]:
        """The warning for each result on random inputs."""
        return ("inputs are random, so ranges and parity do not represent real data",)

    @property
    def samples(self) -> int:
        """Number of feeds."""
        return self.count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for number in range(self.count):
            random = np.random.default_rng((self.seed, number))
            yield {name: _draw(random, spec, limit) for name, (spec, limit) in self._inputs.items()}


def random_feeds(model: Model, shapes: Mapping[str, Shape], seed: int, count: int) -> RandomFeeds:
    """``count`` feeds of plausible values: floats from the standard normal, integers small and not negative.

    Integers that index rows of a table (Gather) span the table; others are 0 or 1. ``shapes`` come from
    `resolve_shapes`.
    """
    specs = input_specs(model, shapes)
    inputs = {name: (spec, _integer_limit(model, name)) for name, spec in specs.items()}
    return RandomFeeds(seed=seed, count=count, _inputs=inputs)


def _draw(random: np.random.Generator, spec: InputSpec, limit: int) -> Array:
    if np.issubdtype(spec.dtype, np.integer):
        return random.integers(0, limit, spec.shape).astype(spec.dtype)
    if spec.dtype == np.bool_:
        return random.integers(0, 2, spec.shape).astype(np.bool_)
    return random.standard_normal(spec.shape).astype(spec.dtype)


def _integer_limit(model: Model, name: str) -> int:
    """The size of the smallest table that the input indexes, else `_FEW`."""
    sizes = []
    tensors, seen = [name], {name}
    while tensors:
        for consumer in model.consumers.get(tensors.pop(), ()):
            node = model.by_name[consumer.node]
            if node.op_type == "Gather" and consumer.input == 1:
                sizes.append(_table_size(model, node.inputs[0], int(str(node.attributes.get("axis", 0)))))
            elif node.op_type in _SAME_VALUES and consumer.input == 0 and node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                tensors.append(node.outputs[0])
    return min(sizes, default=_FEW)


def _table_size(model: Model, table: str, axis: int) -> int:
    """Rows along the axis; 1, the only safe limit, if unknown."""
    shape = model.shape(table)
    size = None if shape is None else shape[axis]
    return size if size else 1
