"""Finds the corrections that reduce the error: each is added to the earlier ones and judged on held-out samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from qdqspec.corrections.bias import Observe, bias_shift, observed_means
from qdqspec.corrections.equalization import WeightSteps, chosen_equalizations
from qdqspec.corrections.judge import USABLE_DB, Errors, Judge, is_gain
from qdqspec.corrections.layers import LinearLayer, find_layers
from qdqspec.corrections.ranges import Ranges, range_options, widened
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.placement.edit.biases import biased_layer
from qdqspec.placement.edit.equalize import Equalization, equalized, find_chains, products_of
from qdqspec.quantize.corrections import NO_CORRECTIONS, Corrections, weight_key
from qdqspec.quantize.formats import QuantParams, number_format
from qdqspec.quantize.quantizer import Quantizer
from qdqspec.quantize.ranges import tie_ranges
from qdqspec.types import Consumer, CorrectionGain, Site

JUDGEMENTS = 6  # that fit in the time: where one on all samples takes longer, it is on fewer of them
MEANS = 64  # samples for the means of layer inputs, every second one held out
EXACT_SAMPLES = 2  # on which an equalized model has to compute the same bits


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionTask:
    """The inputs of the search for corrections: the ``allowed`` ones, for these numbers, within ``seconds``.

    The placements of the ``judge`` quantize the ``sites``. None are sought if the first of them has ``enough_db``.
    ``ranges`` gives those of every calibration method on some of the samples: all, or the even ones. ``method`` is the
    case's own. ``saturates`` is whether sums of two neighbouring u8 x s8 products saturate on the processor. Numbers
    of tensors in ``fixed`` are not changed. ``equalized`` is the same task for a model whose constants are scaled, with
    the ranges of these tensors calibrated again.
    """

    model: Model
    judge: Judge
    numbers: Quantizer
    sites: tuple[Site, ...]
    ranges: Callable[[bool], Mapping[str, Ranges]]
    method: str
    observe: Observe
    allowed: tuple[str, ...]
    saturates: bool
    fixed: frozenset[str] = frozenset()
    equalized: Callable[[Model, Collection[str]], CorrectionTask]
    enough_db: float
    seconds: float
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCorrections:
    """The accepted corrections, and the gain of each that was tried, also of rejected ones.

    ``failures`` are the reasons why others could not be tried, by name; ``untried`` were not begun within the time.
    ``model`` and ``numbers`` are those of the equalized model, ``None`` if no chain is ``equalized``.
    """

    corrections: Corrections = NO_CORRECTIONS
    gains: tuple[CorrectionGain, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    untried: tuple[str, ...] = ()
    equalized: tuple[Equalization, ...] = ()
    model: Model | None = None
    numbers: Quantizer | None = None


def find_corrections(task: CorrectionTask) -> FoundCorrections:
    """Try each allowed correction in turn, until the first placement has enough SQNR or the time is up.

    Only equalization is tried while all outputs are meaningless: they do not represent placements that can be selected.
    A correction for which the runtime fails is not used. Raises `BackendError` if that is before the first one, and
    `RehearsalRefusedError` if the model cannot be rehearsed.
    """
    search, failures, untried = _Search(task), dict[str, str](), list[str]()
    for name, attempt in _KINDS.items():
        if name not in task.allowed or search.errors[0].least_db >= task.enough_db:
            continue
        if name != "equalization" and not search.is_usable:
            continue
        if search.is_over:
            untried.append(name)
            continue
        try:
            attempt(search)
        except BackendError as error:
            failures[name] = error.what
    is_changed = bool(search.changes)
    return FoundCorrections(
        corrections=search.taken,
        gains=tuple(search.gains),
        failures=failures,
        untried=tuple(untried),
        equalized=search.changes,
        model=search.task.model if is_changed else None,
        numbers=search.task.numbers if is_changed else None,
    )


class _Search:
    """The corrections accepted so far (``taken``, and the ``changes`` of the model), and the errors with them."""

    def __init__(self, task: CorrectionTask) -> None:
        self.task = task
        self.taken = task.numbers.corrections
        self.changes: tuple[Equalization, ...] = ()
        self.gains: list[CorrectionGain] = []
        started = task.clock()
        self.until = started + task.seconds
        late = started + task.seconds / JUDGEMENTS
        self.errors = task.judge.errors(task.numbers, lambda: task.clock() > late)
        self.layers = find_layers(task.model, task.sites)

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return self.task.clock() > self.until

    @property
    def is_usable(self) -> bool:
        """Whether a placement has outputs that are not meaningless."""
        return any(errors.total_db >= USABLE_DB for errors in self.errors)

    @property
    def numbers(self) -> Quantizer:
        """The numbers with the corrections accepted so far."""
        return self.task.numbers.corrected(self.taken)

    def errors_of(self, corrections: Corrections) -> tuple[Errors, ...]:
        """The errors with these corrections."""
        return self.task.judge.errors(self.task.numbers.corrected(corrections))

    def attempt(self, name: str, tried: Corrections, changed: int) -> None:
        """Accept corrections if they gain, and record the gain."""
        after = self.errors_of(tried)
        if self.record(name, after, self.errors, changed):
            self.taken, self.errors = tried, after

    def record(self, name: str, after: tuple[Errors, ...], before: tuple[Errors, ...], changed: int) -> bool:
        """Record the gain of a correction, and return whether it is taken."""
        taken = is_gain(after, before)
        gain = CorrectionGain(
            name=name,
            before_db=before[0].total_db,
            after_db=after[0].total_db,
            changed=changed,
            taken=taken,
        )
        self.gains.append(gain)
        return taken

    def weights(self) -> list[tuple[Site, LinearLayer]]:
        """The weight sites in integer formats with scales of their own, each with its layer; one for each format."""
        sites = {weight_key(s): s for s in self.task.sites if s.weight and s.tensor in self.layers}
        formats = {key: number_format(site.format) for key, site in sites.items()}
        return [
            (site, self.layers[site.tensor])
            for key, site in sites.items()
            if not formats[key].floating
            and not formats[key].scale_type
            and site.tensor not in self.task.fixed
        ]

    def pairs(self) -> dict[str, QuantParams]:
        """The parameters of each layer's quantized input, by its weight; the first format of several."""
        sites = [site for site in reversed(self.task.sites) if not site.weight]
        by_end = {(site.tensor, end): site for site in sites for end in site.consumers}
        found: dict[str, QuantParams] = {}
        for name, layer in self.layers.items():
            site = by_end.get((layer.source, Consumer(layer.node.name, 0)))
            fmt = None if site is None else number_format(site.format)
            if site is not None and fmt is not None and not (fmt.dynamic or fmt.at_run_time):
                found[name] = self.numbers.params(site)
        return found


def _equalize(search: _Search) -> None:
    """Scale channels by powers of two where that helps. Other corrections are then found for the scaled model."""
    task = search.task
    quantized = {site.tensor for site in task.sites if not site.weight}
    products = products_of(task.model)  # have their factors
    chains = [
        chain
        for chain in find_chains(task.model, task.fixed)
        if chain.maker.name not in products
        and any(absorber.source in quantized for absorber in chain.absorbers)
    ]
    steps = WeightSteps(
        steps=63 if task.saturates else 127,
        per_channel=frozenset(site.tensor for site in task.sites if site.weight and site.axis is not None),
    )
    chosen = chosen_equalizations(
        task.model, chains, steps, lambda sources: task.observe(sources, task.judge.part("fit"))
    )
    if not chosen:
        return
    changes = tuple(change for _, change in chosen)
    tensors = {tensor for chain, _ in chosen for tensor in chain.tensors}
    other = task.equalized(equalized(task.model, changes), tensors)
    other = replace(other, judge=replace(task.judge, model=other.model))
    is_exact = _computes_the_same(task, other)
    after = other.judge.errors(other.numbers) if is_exact else search.errors
    if search.record("equalization", after, search.errors, len(changes)):
        search.task, search.taken = other, other.numbers.corrections
        search.errors, search.changes = after, changes


def _computes_the_same(one: CorrectionTask, other: CorrectionTask) -> bool:
    """Whether two models have the same outputs on some samples, bit for bit."""
    runs = (task.observe(task.model.outputs, task.judge.part("fit", EXACT_SAMPLES)) for task in (one, other))
    return all(
        mine[name].tobytes() == its[name].tobytes() for mine, its in zip(*runs, strict=True) for name in mine
    )


def _choose_ranges(search: _Search) -> None:
    """One calibration method and margin for all activations; the best by ranges of the even samples on the others."""
    task = search.task
    own = search.numbers.ranges
    able = {site.tensor for site in task.sites if not site.weight} - task.fixed

    def corrections(ranges: Ranges, factor: float) -> Corrections:
        wider = widened(task.model, tie_ranges(task.model, ranges), factor)
        changed = {t: span for t, span in wider.items() if t in able and span != own.get(t)}
        return replace(search.taken, ranges=changed)

    by_even = task.ranges(True)
    before = search.errors_of(corrections(by_even[task.method], 1.0))
    best, gained = None, before
    for method, factor in range_options(tuple(by_even), task.method):
        if search.is_over:
            break
        after = search.errors_of(corrections(by_even[method], factor))
        if is_gain(after, gained):
            best, gained = (method, factor), after
    if best is None:
        return
    method, factor = best
    tried = corrections(task.ranges(False)[method], factor)
    search.record("ranges", gained, before, len(tried.ranges))
    search.taken, search.errors = tried, search.errors_of(tried)


def _correct_biases(search: _Search) -> None:
    """Biases without the mean shift of the layers' outputs that their quantized weights cause."""
    task, numbers = search.task, search.numbers
    placed = {site.tensor for site in task.sites}
    of_layer: dict[str, list[Site]] = {}
    for site, layer in search.weights():
        biased = biased_layer(task.model, site)
        if biased is not None and biased.bias not in placed:  # a quantized bias keeps its value
            of_layer.setdefault(layer.weight, []).append(site)
    biases = dict(search.taken.biases)
    layers = [search.layers[name] for name in of_layer]
    feeds = lambda: islice(task.judge.feeds(), MEANS)  # noqa: E731
    for layer, fit, held_out in observed_means(
        layers, feeds, task.observe, search.pairs(), lambda: search.is_over
    ):
        weight = task.model.array(layer.weight)
        for site in of_layer[layer.weight]:
            integers = numbers.integer_weight(site)
            shift = bias_shift(layer, weight, numbers.params(site), integers, fit, held_out)
            if shift is not None:
                biases[weight_key(site)] = shift
    if biases:
        search.attempt("bias", replace(search.taken, biases=biases), len(biases))


_KINDS: Mapping[str, Callable[[_Search], None]] = {
    "equalization": _equalize,
    "ranges": _choose_ranges,
    "bias": _correct_biases,
}
