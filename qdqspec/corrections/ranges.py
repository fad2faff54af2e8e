"""Selects the calibration method of each activation by its effect on the outputs with everything else quantized.

One model with all pairs has scales and zero points as inputs, so that evaluating a choice needs a run and no build.
Their defaults are the values of the first option: only others are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper

from qdqspec.arrays import Array, Feed
from qdqspec.backends.base import Engine
from qdqspec.corrections.judge import Errors, Judge, powers, sure_db
from qdqspec.graph.protos import copy_model
from qdqspec.placement.pairs import QuantSource
from qdqspec.placement.units import Edge
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.quantize.ranges import TensorRange
from qdqspec.quantize.scales import REALS
from qdqspec.rehearsal import Rehearsal
from qdqspec.rehearsal.rehearsal import Values
from qdqspec.types import Placement

Ranges = Mapping[str, TensorRange]

LEAST_DB = 0.02  # smallest gain of one choice over all samples
FIT_SAMPLES = 6  # samples on which single choices are tried
LOST_SAMPLES = 2  # of these, on which a choice that loses on each is given up
PATIENCE = 16  # groups of tensors in a row without a better choice, after which the rest is not tried


def chosen_ranges(
    judge: Judge,
    numbers: Callable[[Ranges], Quantizer],
    groups: Sequence[tuple[str, ...]],
    options: Sequence[Ranges],
    seconds: float,
) -> tuple[Ranges, Ranges]:
    """The best of the ``options`` on the fit samples, and a combination in which each choice gained there.

    ``groups`` are the tensors that share a range. Those whose options differ most come first, until the time is up.
    """
    until = time.monotonic() + seconds
    with (
        judge.open(numbers(options[0]), "fit") as rehearsal,
        _Adjustable.over(rehearsal, judge.placements[0]) as model,
    ):
        found = [(model.errors(numbers(option)), option) for option in options]
        best, first = max(found, key=lambda pair: pair[0].total_db)
        current, winless = dict(first), 0
        for group in sorted(groups, key=lambda group: -_spread(group, options)):
            winless += 1
            for option in _distinct(group, current, options):
                if time.monotonic() > until:
                    return first, current
                tried = current | {tensor: option[tensor] for tensor in group if tensor in option}
                errors = model.errors(numbers(tried), best)
                if errors.gain_db(best) >= LEAST_DB and sure_db(errors.gains_db(best)) >= 0:
                    current, best, winless = tried, errors, 0
            if winless == PATIENCE:
                break
    return first, current


def _spread(group: Sequence[str], options: Sequence[Ranges]) -> float:
    sizes = [option[t].high - option[t].low for option in options for t in group if t in option]
    return max(sizes, default=0.0) / max(min(sizes, default=1.0), 1e-30)


def _distinct(group: Sequence[str], current: Ranges, options: Sequence[Ranges]) -> Iterator[Ranges]:
    """The options that give a group ranges different from its own and from each other's."""
    seen = [tuple(current.get(tensor) for tensor in group)]
    for option in options:
        own = tuple(option.get(tensor) for tensor in group)
        if not any(_alike(own, other) for other in seen):
            seen.append(own)
            yield option


def _alike(one: Sequence[TensorRange | None], other: Sequence[TensorRange | None]) -> bool:
    """Whether ranges are equal within two hundredths of their size."""
    return all(
        a is None or b is None or abs(a.high - b.high) + abs(a.low - b.low) <= 0.02 * (b.high - b.low)
        for a, b in zip(one, other, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adjustable:
    """A rehearsal whose activation pairs have scale and zero point as inputs; ``defaults`` are used if not given."""

    rehearsal: Rehearsal
    engine: Engine
    constants: Mapping[int, tuple[str, ...]]
    defaults: Mapping[str, Array]
    setting: npt.NDArray[np.bool_]
    feeds: list[tuple[Feed, Values]]
    names: Mapping[Edge, str]
    switch_input: str

    @classmethod
    @contextmanager
    def over(cls, rehearsal: Rehearsal, placement: Placement) -> Iterator[_Adjustable]:
        graph = rehearsal.graph
        model = graph.whole(rehearsal.edges)
        active = (n for n, site in enumerate(rehearsal.switches) if not site.weight)
        constants = {number: graph.constant_names(number) for number in active}
        moved = {name for names in constants.values() for name in names}
        proto = copy_model(model.proto)
        for tensor in model.proto.graph.initializer:
            if tensor.name in moved:  # an input with a default value
                info = helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                proto.graph.input.append(info)
        adjustable = type(model)(proto=proto, input=model.input, numbers=model.numbers, names=model.names)
        feeds = [one for _, one in zip(range(FIT_SAMPLES), rehearsal.references(), strict=False)]
        with closing(rehearsal.load(adjustable, "adjustable", rehearsal.runtime.exact)) as engine:
            yield cls(
                rehearsal=rehearsal,
                engine=engine,
                constants=constants,
                defaults=dict(_values(rehearsal, constants, rehearsal.subject.numbers)),
                setting=rehearsal.switches.setting(placement)[list(model.numbers)],
                feeds=feeds,
                names=model.names,
                switch_input=model.input,
            )

    def errors(self, numbers: Quantizer, best: Errors | None = None) -> Errors:
        """The error with these numbers; of the first samples only if each of these has a larger error than ``best``."""
        values = _values(self.rehearsal, self.constants, numbers)
        given = {name: value for name, value in values if not np.array_equal(value, self.defaults[name])}
        rows = []
        for feed, reference in self.feeds:
            found = self.engine.run({**feed, **given, self.switch_input: self.setting})
            edges = self.rehearsal.guiding_edges
            rows.append(powers([(reference[e], found[self.names[e]]) for e in edges]))
            if best is not None and len(rows) == LOST_SAMPLES:
                errors = Errors(np.array(rows))
                if errors.gains_db(best).max() < 0 and errors.gain_db(best) < 0:
                    return errors
        return Errors(np.array(rows))


def _values(
    rehearsal: Rehearsal, constants: Mapping[int, tuple[str, ...]], numbers: QuantSource
) -> Iterator[tuple[str, Array]]:
    """Scale and zero point of each switch by the names of its ``constants``."""
    for number, names in constants.items():
        site = rehearsal.switches[number]
        params = numbers.params(site)
        real = REALS[rehearsal.subject.model.elem_type(site.tensor) or TensorProto.FLOAT]
        values: tuple[Array, ...] = (params.scale.astype(real), params.zero_point.astype(params.format.dtype))
        yield from zip(names, values, strict=False)
