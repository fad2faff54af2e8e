"""Finds the corrections that reduce the error: each is added to the earlier ones and validated on held-out samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice

import numpy as np

from qdqspec.corrections.equalization import LARGE_GAIN, LEAST_GAIN, WeightSteps, chosen_equalizations
from qdqspec.corrections.judge import USABLE_DB, Errors, Judge, TensorKind, lower_bound_db
from qdqspec.corrections.layers import LinearLayer, find_layers
from qdqspec.corrections.overflow import PairMaxima
from qdqspec.corrections.ranges import FACTORS, Ranges, chosen_ranges, widened
from qdqspec.corrections.statistics import InputStatistics, Observe, observed_statistics
from qdqspec.corrections.weights import (
    bias_shift,
    rounded_weight,
)
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.placement.edit.biases import biased_layer
from qdqspec.placement.edit.equalize import Equalization, equalized, find_chains, products_of
from qdqspec.quantize.corrections import NO_CORRECTIONS, Corrections, WeightNumbers, weight_key
from qdqspec.quantize.formats import QuantParams, number_format
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.quantize.ranges import tie_ranges, tied_groups
from qdqspec.types import CORRECTIONS, Consumer, CorrectionGain, Placement, Site

LEAST_DB = 0.1  # smallest mean gain over placements on held-out samples
MOST_LOSS_DB = 0.05  # largest loss of any of these placements
MOST_JUDGED = 3  # corrections whose errors are kept: a step may have judged its own result
SURE = 2.0  # standard errors by which a loss on the first samples is sure
RANGES_SHARE = 0.7  # of the time that is left
LEAST_JUDGEMENTS = 6  # that fit in the time: where one on all samples takes longer, it is on fewer of them
MARGIN_SAMPLES = 4  # held out, at least, to judge margins
# Time limit, in processor times of the first judgement: a small model needs less than a large one.
JUDGEMENTS = 25
# times of the first judgement that equalization takes: statistics, calibration, another rehearsal
EQUALIZING = 3
EXACT_SAMPLES = 2  # on which an equalized model has to compute the same bits
STATISTICS_SHARE = 0.5  # of the time that is left, for the statistics of biases or of rounding
STATISTICS = 64  # samples for the statistics of layer inputs, every second one held out


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The inputs of the search for corrections: the ``allowed`` ones, for these numbers, within ``seconds``.

    ``ranges`` gives those of every calibration method, including the case's own ``method``, and takes about
    ``ranges_seconds``: it is not called if fewer are left. ``fit_ranges`` gives those of that method by the even
    samples alone. ``saturates`` is whether sums of two neighbouring u8 x s8 products saturate
    on the processor. Numbers of tensors in ``fixed`` are not changed. ``units`` are those that the first placement
    judged quantizes; ``place`` gives the placement of some of them, ``without`` the placements to judge with some in
    floating point. The ``first`` placement meets the limits as it is, and is among those judged.
    ``equalized`` is the same question about a model whose constants are scaled, with the ranges of these tensors
    calibrated again.
    """

    model: Model
    judge: Judge
    numbers: Quantizer
    sites: tuple[Site, ...]
    units: tuple[str, ...]
    place: Callable[[Collection[str]], Placement]
    without: Callable[[Collection[str]], tuple[Placement, ...]]
    ranges: Callable[[], Mapping[str, Ranges]]
    fit_ranges: Callable[[], Ranges]
    method: str
    observe: Observe
    allowed: tuple[str, ...]
    saturates: bool
    fixed: frozenset[str] = frozenset()
    first: Placement | None = None
    equalized: Callable[[Model, Collection[str]], Question]
    seconds: float
    ranges_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCorrections:
    """The accepted corrections, and the gain of each that was tried, also of rejected ones.

    ``failures`` are the reasons why others could not be tried, by name; ``untried`` were not begun within the time.
    ``model`` and ``numbers`` are those of the
    equalized model, ``None`` if no chain is ``equalized``.
    """

    corrections: Corrections = NO_CORRECTIONS
    gains: tuple[CorrectionGain, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    untried: tuple[str, ...] = ()
    equalized: tuple[Equalization, ...] = ()
    model: Model | None = None
    numbers: Quantizer | None = None


def find_corrections(question: Question) -> FoundCorrections:
    """Try each allowed correction in turn. Raises `RehearsalRefusedError` if the model cannot be rehearsed.

    A correction for which the runtime fails is not used. Raises `BackendError` if that is before the first one.
    """
    search, failures = _Search(question), dict[str, str]()
    untried = list[str]()
    for name, attempt in _attempts(search, question.allowed):
        if search.is_over:
            untried += [name] if name not in untried else []
            continue
        try:
            attempt()
        except BackendError as error:
            failures[name] = error.what
    found = FoundCorrections(
        corrections=search.taken, gains=tuple(search.gains), failures=failures, untried=tuple(untried)
    )
    if not search.equalized:
        return found
    question = search.question
    return replace(found, equalized=search.equalized, model=question.model, numbers=question.numbers)


def _attempts(search: _Search, allowed: Collection[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The steps by name; each depends on the results of those before."""
    if "equalization" in allowed:
        yield "equalization", search.attempt_equalization
    if "margins" in allowed and search.judged >= MARGIN_SAMPLES:
        yield "margins", search.attempt_margins
    for name in CORRECTIONS:
        if name in allowed and name in _STEPS:
            yield name, partial(search.attempt, name, _STEPS[name])


class _Search:
    """The corrections accepted so far, and the error with them."""

    def __init__(self, question: Question) -> None:
        self.taken = question.numbers.corrections
        self.equalized: tuple[Equalization, ...] = ()
        self.gains: list[CorrectionGain] = []
        started = question.clock()
        late = started + question.seconds / LEAST_JUDGEMENTS
        self.errors = question.judge.errors(question.numbers, is_late=lambda: question.clock() > late)
        self.judged = len(self.errors[0].powers) if self.errors else question.judge.samples
        # corrections are judged on as many samples
        self.question = replace(question, judge=replace(question.judge, samples=self.judged))
        rehearsal, _ = question.judge.rehearsal(question.numbers, "held-out")
        self._judging = question.clock() - started
        most = JUDGEMENTS * rehearsal.runs_at_once * self._judging
        self.until = started + min(question.seconds, most)
        is_usable = any(
            one.total_db >= USABLE_DB
            for one, placement in zip(self.errors, question.judge.placements, strict=True)
            if placement != question.first
        )
        if self.errors and not is_usable and question.clock() < late:
            self._exclude_dominating_units()
        self.layers = find_layers(question.model, question.sites)
        self.margin: tuple[float, frozenset[str]] = 1.0, frozenset()  # of ranges, and tensors without it
        self._judged: list[tuple[Corrections, tuple[Errors, ...]]] = []  # the last ones

    def _exclude_dominating_units(self) -> None:
        """Judge the other units alone, if a few make the outputs of all placements meaningless."""
        question, judge = self.question, self.question.judge
        left = judge.dominating(question.numbers, question.units, question.place)
        if left:
            placements = (judge.placements[0], *question.without(left))
            self.question = replace(question, judge=replace(judge, placements=placements))
            self.errors = self.question.judge.errors(question.numbers)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Those that are judged, of which `errors` are the errors."""
        return self.question.judge.placements

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.question.clock() > self.until

    def statistics(
        self, weights: Collection[str], numbers: Quantizer, *, moments: bool
    ) -> Iterator[tuple[LinearLayer, InputStatistics, InputStatistics]]:
        """The statistics of the inputs of layers with these weights, collected in a share of the time that is left."""
        question, now = self.question, self.question.clock()
        late = now + STATISTICS_SHARE * (self.until - now)
        return observed_statistics(
            [layer for name, layer in self.layers.items() if name in weights],
            lambda: islice(question.judge.feeds(), STATISTICS),
            question.observe,
            self.pairs(numbers),
            lambda: question.clock() > late,
            moments=moments,
        )

    def numbers(self, corrections: Corrections) -> Quantizer:
        """The numbers with these corrections."""
        return self.question.numbers.corrected(corrections)

    def attempt(self, name: str, step: _Step) -> None:
        """Accept the result of a step if it gains on held-out samples, and record the gain."""
        tried, changed = step.corrected(self, self.taken)
        if not changed:
            return
        after = self.judged_errors(tried, step.numbers, needs_inputs=step.needs_inputs)
        taken = self.accepts(after, self.errors, self.placements, needs_inputs=step.needs_inputs)
        self._record(name, self.errors, after, changed, taken=taken)
        if taken:
            self.taken, self.errors = tried, after

    def _record(
        self, name: str, before: tuple[Errors, ...], after: tuple[Errors, ...], changed: int, *, taken: bool
    ) -> None:
        """Record the gain of a correction; an earlier one of the same name is replaced."""
        gain = CorrectionGain(
            name=name,
            before_db=before[0].first(len(after[0].powers)).total_db,
            after_db=after[0].total_db,
            changed=changed,
            taken=taken,
        )
        self.gains = [*(known for known in self.gains if known.name != name), gain]

    def attempt_equalization(self) -> None:
        """Scale channels by powers of two where that helps. Other corrections are then found for the scaled model.

        If it takes more than half of the time that is left, only a large gain is worth it. It is judged where only the
        layers behind the scaled channels are quantized too, whose gain the errors of other operators may hide.
        """
        question = self.question
        takes_long = EQUALIZING * self._judging > (self.until - question.clock()) / 2
        sites = question.sites
        quantized = {site.tensor for site in sites if not site.weight}
        products = products_of(question.model)  # have their factors
        chosen = chosen_equalizations(
            question.model,
            [
                chain
                for chain in find_chains(question.model, question.fixed)
                if chain.maker.name not in products
                and any(absorber.source in quantized for absorber in chain.absorbers)
            ],
            WeightSteps(
                steps=63 if question.saturates else 127,
                per_channel=frozenset(site.tensor for site in sites if site.weight and site.axis is not None),
            ),
            lambda sources: question.observe(sources, question.judge.part("fit")),
            LARGE_GAIN if takes_long else LEAST_GAIN,
        )
        if not chosen:
            return
        changes = tuple(change for _, change in chosen)
        tensors = {tensor for chain, _ in chosen for tensor in chain.tensors}
        other = question.equalized(equalized(question.model, changes), tensors)
        other = replace(other, judge=replace(question.judge, model=other.model))
        if not _computes_the_same(question, other):
            self._record("equalization", self.errors, self.errors, len(changes), taken=False)
            return
        layers = {
            name for chain, _ in chosen for one in chain.absorbers for name in (one.source, one.weight.tensor)
        }
        everything = self.placements[0].sites
        alone = Placement(sites=frozenset(site for site in everything if site.tensor in layers))
        placements = (*self.placements, alone)
        before = (*self.errors, question.judge.errors_of(alone, question.numbers))
        after = replace(other.judge, placements=placements).compared(
            other.numbers, before, None, self._stop_rule(before, placements, needs_inputs=True)
        )
        taken = self.accepts(after, before, placements, needs_inputs=True)
        self._record("equalization", self.errors, after, len(changes), taken=taken)
        if taken:
            self.question, self.errors, self.equalized = other, after[:-1], changes

    def accepts(
        self,
        after: tuple[Errors, ...],
        before: tuple[Errors, ...],
        placements: Sequence[Placement],
        *,
        needs_inputs: bool = False,
    ) -> bool:
        """Whether held-out errors of placements are smaller than ``before``, where outputs are usable.

        No placement may lose over all samples, nor their mean without any single sample; the mean has to be a gain by
        its standard error too.
        With ``needs_inputs``, placements of weights alone are ignored: the correction holds for quantized inputs.
        """
        if _is_cut_short(after, before):
            return False
        pairs = _decisive(after, before, placements, needs_inputs=needs_inputs)
        gains = _gains(*zip(*pairs, strict=True)) if pairs else []
        changed = [(new, old) for new, old in pairs if new.gain_db(old)]
        if not changed or not _is_gain(gains) or not _is_sure(changed):
            return False
        return lower_bound_db(np.mean([new.gains_db(old) for new, old in changed], axis=0)) >= -MOST_LOSS_DB

    def judged_errors(
        self,
        corrections: Corrections,
        numbers: TensorKind,
        before: tuple[Errors, ...] | None = None,
        *,
        needs_inputs: bool = False,
    ) -> tuple[Errors, ...]:
        """The errors with corrections of these numbers; on a few samples if a placement loses for sure."""
        known = self.errors if before is None else before
        if found := [errors for tried, errors in self._judged if tried is corrections]:
            return found[0]
        is_lost = self._stop_rule(known, self.placements, needs_inputs=needs_inputs)
        after = self.question.judge.compared(self.numbers(corrections), known, numbers, is_lost)
        self._judged = [(corrections, after), *self._judged[:MOST_JUDGED]]
        return after

    def _stop_rule(
        self, before: tuple[Errors, ...], placements: Sequence[Placement], *, needs_inputs: bool
    ) -> Callable[[tuple[Errors, ...]], bool]:
        """Whether a placement has lost for sure, by errors on the first samples."""

        def is_lost(after: tuple[Errors, ...]) -> bool:
            pairs = _decisive(after, before, placements, needs_inputs=needs_inputs)
            return any(lower_bound_db(new.gains_db(old), -SURE) < -MOST_LOSS_DB for new, old in pairs)

        return is_lost

    def attempt_margins(self) -> None:
        """Widen the ranges of activations if that is expected to help on data that did not calibrate them.

        All samples calibrate the ranges in use, so that none of those held out exceeds them; other data does. It
        exceeds ranges of the even samples, which are half of them, about twice as often: its noise is estimated as the
        mean of those with the ranges in use and with these.
        """
        half = self._errors_of(self._fit_ranges, 1.0, frozenset())
        before = _mean_errors(self.errors, half)
        found = dict[tuple[float, frozenset[str]], tuple[float, tuple[Errors, ...]]]()
        for factor in FACTORS:
            for kept in dict.fromkeys((frozenset[str](), self.linear_inputs)):
                after = self._errors_of(self._fit_ranges, factor, kept, half)
                if _is_cut_short(after, half):
                    found[factor, kept] = 0.0, after  # a loss even where most values are beyond the ranges
                    continue
                after = _mean_errors(self._errors_of(self._own_ranges, factor, kept), after)
                pairs = [pair for pair in zip(after, before, strict=True) if _is_usable(*pair)]
                gains, is_sure = _gains(after, before), _is_sure(pairs)
                found[factor, kept] = sum(gains) if _is_gain(gains) and is_sure else 0.0, after
                if is_sure and min(gains, default=0.0) >= -MOST_LOSS_DB:
                    break  # no placement loses: no ranges have to be kept
        best = max(found, key=lambda key: found[key][0])
        tried = self._with_margin(self._own_ranges, *best)
        taken = found[best][0] > 0
        changed = [tensor for tensor, span in tried.items() if span != self._own_ranges.get(tensor)]
        self._record("margins", before, found[best][1], len(changed), taken=taken)
        if taken:
            self.margin = best
            self.taken = replace(self.taken, ranges={tensor: tried[tensor] for tensor in changed})
            self.errors = self._whole_errors(self.taken)

    @property
    def fitted(self) -> Placement:
        """The first placement with usable outputs, or the first of all."""
        pairs = zip(self.placements, self.errors, strict=True)
        return next((placement for placement, one in pairs if one.total_db >= USABLE_DB), self.placements[0])

    @cached_property
    def linear_inputs(self) -> frozenset[str]:
        """The activations that are quantized where only linear operators are; empty if there is no such placement."""
        quantized = [frozenset(s.tensor for s in one.ordered if not s.weight) for one in self.placements]
        return frozenset(tensor for some in quantized if some != quantized[0] for tensor in some)

    @cached_property
    def activations(self) -> tuple[str, ...]:
        """The activations whose ranges may change."""
        tensors = dict.fromkeys(site.tensor for site in self.question.sites if not site.weight)
        return tuple(tensor for tensor in tensors if tensor not in self.question.fixed)

    @cached_property
    def _own_ranges(self) -> Ranges:
        calibrated = self.question.numbers.ranges
        return {tensor: calibrated[tensor] for tensor in self.activations if tensor in calibrated}

    @cached_property
    def _fit_ranges(self) -> Ranges:
        found = tie_ranges(self.question.model, self.question.fit_ranges())
        return {tensor: found[tensor] for tensor in self.activations if tensor in found}

    def widened(self, ranges: Ranges) -> Ranges:
        """Ranges with the margin that was accepted."""
        return self._with_margin(ranges, *self.margin)

    def _with_margin(self, ranges: Ranges, factor: float, kept: frozenset[str]) -> Ranges:
        return widened(self.question.model, ranges, factor, {*kept, *self.question.fixed})

    def _errors_of(
        self, ranges: Ranges, factor: float, kept: frozenset[str], before: tuple[Errors, ...] | None = None
    ) -> tuple[Errors, ...]:
        tried = replace(self.taken, ranges=self._with_margin(ranges, factor, kept))
        return (
            self._whole_errors(tried) if before is None else self.judged_errors(tried, "activations", before)
        )

    def _whole_errors(self, ranges: Corrections) -> tuple[Errors, ...]:
        """The errors with corrections of ranges, on all samples."""
        return self.question.judge.compared(self.numbers(ranges), self.errors, "activations", lambda _: False)

    def _may_change(self, site: Site) -> bool:
        """Whether a weight has an integer format with scales of its own, and is not fixed."""
        fmt = number_format(site.format)
        return not fmt.floating and not fmt.scale_type and site.tensor not in self.question.fixed

    def pairs(self, numbers: Quantizer) -> dict[str, QuantParams]:
        """The parameters of each layer's quantized input, by its weight; the first format of several."""
        found: dict[str, QuantParams] = {}
        by_end = {
            (s.tensor, end): s for s in reversed(self.question.sites) if not s.weight for end in s.consumers
        }
        for name, layer in self.layers.items():
            site = by_end.get((layer.source, Consumer(layer.node.name, 0)))
            fmt = None if site is None else number_format(site.format)
            if site is not None and fmt is not None and not (fmt.dynamic or fmt.at_run_time):
                found[name] = numbers.params(site)
        return found

    def weights(self) -> list[tuple[Site, LinearLayer]]:
        """The weight sites in integer formats, each with its layer; one for each number format."""
        sites = {weight_key(s): s for s in self.question.sites if s.weight and s.tensor in self.layers}
        return [(site, self.layers[site.tensor]) for site in sites.values() if self._may_change(site)]


def _computes_the_same(one: Question, other: Question) -> bool:
    """Whether two models have the same outputs on some samples, bit for bit."""
    runs = (q.observe(q.model.outputs, q.judge.part("fit", EXACT_SAMPLES)) for q in (one, other))
    return all(
        mine[name].tobytes() == its[name].tobytes() for mine, its in zip(*runs, strict=True) for name in mine
    )


def _mean_errors(one: Iterable[Errors], other: Iterable[Errors]) -> tuple[Errors, ...]:
    """The errors of each placement with the mean of two noises, on the samples of the second."""
    pairs = zip(one, other, strict=True)
    return tuple(Errors((mine.first(len(its.powers)).powers + its.powers) / 2) for mine, its in pairs)


def _gains(after: Iterable[Errors], before: Iterable[Errors]) -> list[float]:
    """The gain of each placement that is usable and affected."""
    pairs = zip(after, before, strict=True)
    return [gain for new, old in pairs if _is_usable(new, old) and (gain := new.gain_db(old))]


def _decisive(
    after: Iterable[Errors], before: Iterable[Errors], placements: Iterable[Placement], *, needs_inputs: bool
) -> list[tuple[Errors, Errors]]:
    """New and old errors of the placements whose outputs are usable, and for which a correction is meant."""
    return [
        (new, old)
        for new, old, placement in zip(after, before, placements, strict=True)
        if _is_usable(new, old) and not (needs_inputs and all(site.weight for site in placement.sites))
    ]


def _is_cut_short(after: tuple[Errors, ...], before: tuple[Errors, ...]) -> bool:
    """Whether errors are those of the first samples, because a placement loses by them."""
    return bool(after) and len(after[0].powers) < len(before[0].powers)


def _is_usable(after: Errors, before: Errors) -> bool:
    """Whether a placement's outputs are meaningful with or without a correction."""
    return max(after.total_db, before.total_db) >= USABLE_DB


def _is_gain(gains: Sequence[float]) -> bool:
    """Whether placements gain in the mean, and none loses."""
    return bool(gains) and sum(gains) / len(gains) >= LEAST_DB and min(gains) >= -MOST_LOSS_DB


def _is_sure(pairs: Iterable[tuple[Errors, Errors]]) -> bool:
    """Whether placements do not lose in the mean without any single sample, whose gain may be chance.

    The pairs are new and old errors; a placement without a gain or a loss does not count.
    """
    found = [new.gains_without_db(old) for new, old in pairs if new.gain_db(old)]
    return not found or float(np.mean(found, axis=0).min()) >= -MOST_LOSS_DB


def _with_ranges(search: _Search, taken: Corrections) -> tuple[Corrections, int]:
    """The best single method for all activations, or the best for each, decided on held-out samples.

    A gain with everything quantized may be a loss where only linear operators are: then their inputs keep their ranges.
    """
    question = search.question
    if question.ranges_seconds > search.until - question.clock():
        return taken, 0
    tied = {
        name: search.widened(tie_ranges(question.model, ranges)) for name, ranges in question.ranges().items()
    }
    own, calibrated = tied[question.method], question.numbers.ranges

    def corrected(ranges: Ranges) -> Corrections:
        changed = {t: ranges[t] for t in search.activations if t in ranges and ranges[t] != calibrated.get(t)}
        return replace(taken, ranges=changed)

    found = chosen_ranges(
        question.judge,
        search.fitted,
        lambda ranges: search.numbers(corrected(ranges)),
        tied_groups(question.model, search.activations),
        list(tied.values()),
        RANGES_SHARE * (search.until - question.clock()),
    )
    linear = search.linear_inputs
    options = [*found, {t: own[t] if t in linear and t in own else r for t, r in found[-1].items()}]
    tried = [corrected(ranges) for number, ranges in enumerate(options) if ranges not in options[:number]]
    errors = [search.judged_errors(some, "activations") for some in tried]
    totals = [
        (search.accepts(some, search.errors, search.placements), sum(one.total_db for one in some))
        for some in errors
    ]
    chosen = tried[totals.index(max(totals))]
    return chosen, sum(span != taken.ranges.get(tensor) for tensor, span in chosen.ranges.items())


def _with_bias(search: _Search, taken: Corrections) -> tuple[Corrections, int]:
    """Biases without the mean shift of the layers' outputs that their quantized weights cause."""
    question, numbers = search.question, search.numbers(taken)
    placed = {site.tensor for site in question.sites}
    of_layer: dict[str, list[Site]] = {}
    for site, layer in search.weights():
        biased = biased_layer(question.model, site)
        if biased is not None and biased.bias not in placed:  # a quantized bias keeps its value
            of_layer.setdefault(layer.weight, []).append(site)
    biases = dict(taken.biases)
    for layer, fit, held_out in search.statistics(of_layer, numbers, moments=False):
        weight = question.model.array(layer.weight)
        for site in of_layer[layer.weight]:
            integers = numbers.integer_weight(site)
            shift = bias_shift(layer, weight, numbers.params(site), integers, fit.means, held_out.means)
            if shift is not None:
                biases[weight_key(site)] = shift
    return replace(taken, biases=biases), len(biases)


def _with_rounding(search: _Search, taken: Corrections) -> tuple[Corrections, int]:
    """Weights rounded by the second moments of their layers' inputs."""
    question, numbers = search.question, search.numbers(taken)
    of_layer: dict[str, list[Site]] = {}
    for site, layer in search.weights():
        of_layer.setdefault(layer.weight, []).append(site)
    weights, biases, changed = dict(taken.weights), dict(taken.biases), 0
    for layer, fit, held_out in search.statistics(of_layer, numbers, moments=True):
        weight = question.model.array(layer.weight)
        for site in of_layer[layer.weight]:
            params = numbers.params(site)
            may_overflow = question.saturates and site.format == "int8"
            bound = (numbers.sum_bound(site) or PairMaxima.of_any_input(layer)) if may_overflow else None
            integers = rounded_weight(layer, weight, params, fit, held_out, bound=bound)
            if integers is not None:
                weights[weight_key(site)] = WeightNumbers(scale=params.scale, integers=integers)
                changed += 1
                if biases.pop(weight_key(site), None) is not None:  # other integers, another shift
                    shift = bias_shift(layer, weight, params, integers, fit.means, held_out.means)
                    biases |= {} if shift is None else {weight_key(site): shift}
        if search.is_over:
            break
    return replace(taken, weights=weights, biases=biases), changed


@dataclass(frozen=True, slots=True)
class _Step:
    """A correction: the accepted ones with it and how much they change, and what it changes.

    One that ``needs_inputs`` is for layers whose inputs are quantized too.
    """

    corrected: Callable[[_Search, Corrections], tuple[Corrections, int]]
    numbers: TensorKind = "weights"  # biases are computed with them
    needs_inputs: bool = False


_STEPS = {
    "ranges": _Step(_with_ranges, numbers="activations"),
    "bias": _Step(_with_bias, needs_inputs=True),
    "rounding": _Step(_with_rounding),
}
