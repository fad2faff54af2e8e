"""Chooses the factors of equalization: those with the least estimated noise at the outputs of the layers behind.

The noise of an activation is that of one step for the whole tensor, that of a weight of one step for each output
channel, or one for the whole weight. The candidates are a share of the range of each channel that goes into the
weights (SmoothQuant, arXiv 2211.10438; a half is the equalization of arXiv 1906.04721), and a limit for the channels
with the largest ranges alone. Extremes of few samples are chance: a candidate has to gain on every second sample with
the factors that it has by the other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array, Floats
from qdqspec.graph import Model
from qdqspec.qdq.capabilities import Capabilities
from qdqspec.qdq.chains import Absorber, Chain, Equalization, ScaledConstant, branched, find_chains
from qdqspec.qdq.equalize import ScaledValues, branches_of, equalized
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import QuantizeRules, Site

_STEPS = 255  # of an activation
_TINY = 1e-30


def choose_equalizations(
    model: Model,
    sites: Collection[Site],
    observed: Callable[[Sequence[str]], Iterable[Mapping[str, Array]]],
    *,
    fixed: Collection[str] = (),
    saturates: bool,
) -> list[tuple[Chain, Equalization]]:
    """The chains before quantized tensors that some factors improve, with these: see `choose_factors`.

    ``sites`` are the pairs of the placements that the factors are for. Tensors and constants in ``fixed`` are not
    scaled, nor are channels whose factors are in inserted products.
    """
    quantized = {site.tensor for site in sites if not site.weight}
    products = branches_of(model)
    chains = [
        chain
        for chain in find_chains(model, fixed)
        if chain.maker.name not in products
        and any(absorber.source in quantized for absorber in chain.absorbers)
    ]
    per_channel = {site.tensor for site in sites if site.weight and site.axis is not None}
    return choose_factors(model, chains, observed, per_channel=per_channel, saturates=saturates)


def choose_branches(
    model: Model,
    capabilities: Capabilities,
    rules: QuantizeRules,
    observed: Callable[[Model, Sequence[str]], Iterable[Mapping[str, Array]]],
    least_gain: float = 0.5,
) -> tuple[Equalization, ...]:
    """The branches whose factors reduce the estimated error of the linear operators behind by ``least_gain``.

    A product takes time, so that less is not worth it. ``observed`` gives the values of tensors of a model, which is
    the one with all products.
    """
    possible = {change.branch.product: change for change in branched(model) if change.branch is not None}
    readers = {name for change in possible.values() if change.branch for name in change.branch.readers}
    if not readers or not SchemeSpace(model, capabilities, allowed=readers, rules=rules).units:
        return ()
    extended = equalized(model, tuple(possible.values()))
    chains = [chain for chain in find_chains(extended) if chain.maker.name in possible]
    chosen = choose_factors(
        extended,
        chains,
        lambda sources: observed(extended, sources),
        per_channel={absorber.weight.tensor for chain in chains for absorber in chain.absorbers},
        saturates=capabilities.reduce_range,
        least_gain=least_gain,
    )
    return tuple(replace(possible[chain.maker.name], exponents=change.exponents) for chain, change in chosen)


def choose_factors(
    model: Model,
    chains: Sequence[Chain],
    observed: Callable[[Sequence[str]], Iterable[Mapping[str, Array]]],
    *,
    per_channel: Collection[str],
    saturates: bool,
    least_gain: float = 0.1,
    rounds: int = 4,
    most: int = 10,
) -> list[tuple[Chain, Equalization]]:
    """The chains whose estimated noise some factors reduce by the share ``least_gain`` and more, with these.

    ``observed`` gives the values of tensors. Weights that are not in ``per_channel`` have one scale; they have 7 bits
    where the processor ``saturates``. The channels of a weight with one scale depend on those of the chains before and
    behind: more ``rounds`` over all chains find better factors, and take longer. Exponents are at most ``most``: larger
    ones equalize channels that have hardly any values too, and leave less of the range of floats.
    """
    if not chains:
        return []
    sources = dict.fromkeys(absorber.source for chain in chains for absorber in chain.absorbers)
    statistics = _statistics(chains, observed(tuple(sources)))
    scaling = ScaledValues(model)
    exponents = [np.zeros(chain.channels, np.int64) for chain in chains]
    are_tied = any(a.weight.tensor not in per_channel for chain in chains for a in chain.absorbers)
    observed_chains = [
        (chain, own)
        for chain, own in zip(chains, exponents, strict=True)
        if all(absorber.source in statistics for absorber in chain.absorbers)
    ]
    for _ in range(rounds if are_tied else 1):
        for chain, own in observed_chains:
            even, judged, every = (
                [
                    _Layer(
                        a,
                        statistics[a.source][part],
                        own,
                        chain,
                        scaling,
                        per_channel,
                        63 if saturates else 127,
                    )
                    for a in chain.absorbers
                ]
                for part in range(3)
            )
            noise = [sum(layer.noise(added) for layer in judged) for added in _candidates(even, most)]
            least = sum(layer.noise(np.zeros(chain.channels)) for layer in judged) * (1 - least_gain)
            if not noise or min(noise) >= least:
                continue
            more = _candidates(every, most)[int(np.argmin(noise))].astype(np.int64)
            if np.abs(own + more).max() <= most and scaling.add(chain.by(more)):
                own += more
    together = ScaledValues(model)
    changes = [(chain, chain.by(own)) for chain, own in zip(chains, exponents, strict=True) if own.any()]
    return [(chain, change) for chain, change in changes if together.add(change)]


def _statistics(chains: Iterable[Chain], observed: Iterable[Mapping[str, Array]]) -> dict[str, Floats]:
    """Least and largest value, square sum and count of channels that absorbers read: of even, odd and all samples.

    Tensors that are not finite, or that have values in one sample only, are omitted.
    """
    sources = {a.source: (chain.channels, a.axis) for chain in chains for a in chain.absorbers}
    found = {source: np.zeros((3, 4, channels)) for source, (channels, _) in sources.items()}
    for index, values in enumerate(observed):
        for source, (channels, axis) in sources.items():
            value = values.get(source)
            if value is None or not value.size or source not in found:
                continue
            if not np.isfinite(value).all() or value.shape[axis] % channels:
                del found[source]
                continue
            by_channel = np.moveaxis(value.astype(np.float64), axis, 0).reshape(channels, -1)
            for part in (index % 2, 2):
                low, high, squares, count = found[source][part]
                np.minimum(low, by_channel.min(axis=1), out=low)
                np.maximum(high, by_channel.max(axis=1), out=high)
                squares += (by_channel**2).sum(axis=1)
                count += by_channel.shape[1]
    return {source: parts for source, parts in found.items() if parts[:, 3].all()}


def _candidates(
    layers: Sequence[_Layer],
    most: int,
    shares: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    limits: Sequence[int] = (1, 2, 3, 4),
) -> list[Floats]:
    """Exponents to try, in the same order for any samples; none if no channel has values and weights.

    They move ``shares`` of the ranges into the weights, or limit ranges to so many powers of two below the largest:
    more of either find better factors, and take the time of an estimate each.
    """
    ranges = np.max([np.maximum(layer.high, -layer.low) for layer in layers], axis=0)
    columns = np.max([layer.largest.max(axis=0) for layer in layers], axis=0)
    is_used = (ranges > 0) & (columns > 0)
    if not is_used.any():
        return []
    ranges, columns, wanted = np.log2(ranges + _TINY), np.log2(columns + _TINY), list[Floats]()
    for share in shares:
        exponents = (1 - share) * columns - share * ranges
        wanted.append(exponents - np.median(exponents[is_used]))
    wanted += [np.minimum(ranges[is_used].max() - limit - ranges, 0.0) for limit in limits]
    return [np.clip(np.rint(np.where(is_used, exponents, 0.0)), -most, most) for exponents in wanted]


class _Layer:
    """A layer that reads a chain: its input's channels, and its weight by output and input channel.

    The input's channels have the statistics ``seen``, with the exponents ``before``: ``low``, ``high`` and ``power``
    are their smallest and largest values, and mean squares. ``largest`` and ``square`` are the magnitudes and sums of
    squares of the weight, with one row for a depthwise convolution; ``taps`` the products of an output with a channel.
    ``maker`` are the largest magnitudes and the noise power for a step of 1 by channel of the weight that makes the
    chain, if that has one scale.
    """

    def __init__(
        self,
        absorber: Absorber,
        seen: Floats,
        before: npt.NDArray[np.int64],
        chain: Chain,
        scaling: ScaledValues,
        per_channel: Collection[str],
        steps: int,
    ) -> None:
        low, high, squares, count = seen
        up = 2.0**before
        self.low, self.high, self.power = low * up, high * up, squares * up**2 / count
        rows = _by_channel(scaling, absorber.weight, chain.channels)
        self.largest, self.square = np.abs(rows).max(axis=-1), (rows**2).sum(axis=-1)
        self.taps, self.steps, self.is_depthwise = rows.shape[-1], steps, absorber.is_depthwise
        self.per_channel = absorber.weight.tensor in per_channel
        self.maker: tuple[Floats, float] | None = None
        first = chain.constants[0]
        if chain.maker.op_type in ("Conv", "Gemm", "MatMul") and first.tensor not in per_channel:
            rows_of_maker = np.abs(_by_channel(scaling, first, chain.channels)).transpose(1, 0, 2)
            own = rows_of_maker.reshape(chain.channels, -1)
            powers = self.power / np.maximum((own**2).sum(axis=1), _TINY)  # of the maker's inputs, each
            self.maker = own.max(axis=1), own.shape[1] * float(np.median(powers))

    def noise(self, exponents: Floats) -> float:
        """The noise power at the outputs relative to the signal's, with these exponents."""
        up, down = 2.0**exponents, 2.0**-exponents
        gain = (self.square * down**2).sum(axis=0)  # from the power of one input channel to the outputs
        step = ((self.high * up).max() - (self.low * up).min()) / _STEPS
        noise = step**2 / 12 * float(gain.sum())
        largest = self.largest * down
        if self.is_depthwise:
            rows = largest[0] if self.per_channel else largest.max()
            noise += float(((rows / self.steps) ** 2 / 12 * self.taps * self.power * up**2).sum())
        else:
            rows = largest.max(axis=1) if self.per_channel else np.full(len(largest), largest.max())
            per_tap = ((rows / self.steps) ** 2).sum() / 12
            noise += float(per_tap * self.taps * (self.power * up**2).sum())
        if self.maker is not None:
            its_largest, power = self.maker
            noise += ((its_largest * up).max() / self.steps) ** 2 / 12 * power * float(gain.sum())
        return float(noise / max((self.square * self.power).sum(), _TINY))


def _by_channel(scaling: ScaledValues, constant: ScaledConstant, channels: int) -> Floats:
    """A weight as (other axis, channel, rest)."""
    weight = np.moveaxis(scaling.of(constant.tensor).astype(np.float64), constant.axis, 0)
    # (channel, repeat, other, kernel...)
    apart = weight.reshape(channels, constant.repeat, *weight.shape[1:])
    return np.moveaxis(apart, 2, 0).reshape(weight.shape[1], channels, -1)
