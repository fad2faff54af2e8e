"""Error attribution: ranks Q/DQ pairs by the accuracy they cost, and measures the SQNR without them.

Everything is computed by the default backend without optimization, whatever that of the case: parts of the placement
are rehearsed in one graph, or built one by one if the model cannot be rehearsed.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

from qdqspec.arrays import Array
from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.config.settings import DEFAULT_BACKEND
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.weights import WeightStore
from qdqspec.measurement.isolate import Isolated
from qdqspec.parity.compare import power_of, sqnr_db
from qdqspec.parity.gate import MOST_DB, OutputGate, Runs
from qdqspec.placement.edit.equalize import Equalization
from qdqspec.placement.edit.insert import Inserter
from qdqspec.placement.scheme.scheme_file import SchemeNumbers, fit_pairs, prepared_for
from qdqspec.preparation.auxiliary_runs import ARITHMETIC, reference_runtime, unfused
from qdqspec.preparation.candidates import CandidateFiles
from qdqspec.preparation.case import CaseSetup
from qdqspec.quantize.formats import BIAS_FORMAT
from qdqspec.rehearsal import Rehearsal, RehearsalRefusedError, RehearsedEngine, Runtime, Subject
from qdqspec.temporary import TemporaryFolder
from qdqspec.types import Culprit, CulpritEvidence, PlacedPair, Placement, Site

MOST = 12  # pairs listed by default
REMOVED = 3  # number of these that are also removed cumulatively

_Engines: TypeAlias = Callable[[Placement], AbstractContextManager[Runs]]
Pairs = tuple[Site, ...]  # a pair and its dependents: a weight with its bias


def culprits_of(
    setup: CaseSetup,
    pairs: Sequence[PlacedPair],
    output: str | None = None,
    *,
    factors: Sequence[Equalization] = (),
    most: int | None = MOST,
    seconds: float | None = None,
) -> CulpritEvidence:
    """`find_culprits` for pairs in the model of a case, on the best data available."""
    left = [limit for limit in (seconds, setup.resources.seconds_left()) if limit is not None]
    feeds, data = setup.prepared.comparison_data()
    return find_culprits(
        setup.prepared.base,
        pairs,
        feeds,
        data,
        output=output,
        factors=factors,
        most=most,
        seconds=min(left, default=None),
        options=setup.resources.options,
    )


def find_culprits(
    model: Model,
    pairs: Sequence[PlacedPair],
    feeds: Iterable[Mapping[str, Array]],
    data: str,
    *,
    output: str | None = None,
    factors: Sequence[Equalization] = (),
    most: int | None = MOST,
    seconds: float | None = None,
    options: BuildOptions | None = None,
) -> CulpritEvidence:
    """The pairs with the largest error, measured at ``output`` or else at the output with the lowest SQNR.

    ``most`` is the number of pairs, all for ``None``; ``seconds`` limits the time, and the pairs found by then are
    returned. The numbers of the pairs are those of the model with ``factors``. If the default backend cannot compute
    the model, ``missing`` states so.
    """
    if not pairs:
        return CulpritEvidence(missing="nothing is quantized")
    with ExitStack() as opened:
        try:
            measure = _Measure(opened, model, pairs, factors, feeds, options or BuildOptions(), output)
            found, rest = _noisiest(measure, most, seconds)
            is_whole = most is None or len(found) == min(most, len(measure.pairs))
            return CulpritEvidence(
                output=measure.output,
                pairs=tuple(_with_removals(measure, found)),
                total=len(measure.pairs),
                rest=rest,
                together_db=measure.together_db,
                samples=measure.samples,
                data=data,
                missing="" if is_whole else "the time was over",
            )
        except BackendError as error:
            return CulpritEvidence(missing=f"{DEFAULT_BACKEND} does not compute it: {error.what}")


class _Measure:
    """Measures the SQNR of any subset of a placement."""

    def __init__(
        self,
        opened: ExitStack,
        model: Model,
        pairs: Sequence[PlacedPair],
        factors: Sequence[Equalization],
        feeds: Iterable[Mapping[str, Array]],
        options: BuildOptions,
        output: str | None,
    ) -> None:
        prepared, _ = prepared_for(model, pairs, factors=factors)
        fitting = fit_pairs(prepared, pairs).pairs
        backend = opened.enter_context(Isolated(ARITHMETIC))
        parts = _Parts(
            model=prepared,
            given=require_path(model),
            numbers=SchemeNumbers(prepared, fitting),
            sites=frozenset(pair.site for pair in fitting),
            floating=frozenset(pair.site for pair in fitting if not pair.stored),
        )
        try:
            self._engine = _rehearsed(opened, parts, reference_runtime(opened, options, backend))
        except RehearsalRefusedError:
            self._engine = _built(opened, parts, partial(backend.build, options=unfused(options)))
        with self._engine(Placement(sites=frozenset())) as reference:
            self._gate = OutputGate(reference, feeds)
        self.sites = parts.sites
        self.pairs = _together(prepared, self.sites)
        together = self._by_output(self.sites)
        self.output = output if output in together else min(together, key=together.__getitem__, default="")
        self.together_db = together.get(self.output, MOST_DB)

    @property
    def samples(self) -> int:
        """The number of inputs measured."""
        return self._gate.samples

    def sqnr_db(self, sites: Iterable[Site]) -> float:
        """The SQNR of the model with only these sites."""
        return self._by_output(sites).get(self.output, MOST_DB)

    def power(self, pairs: Iterable[Pairs]) -> float:
        """The noise power of a group of pairs, relative to the signal."""
        return power_of(self.sqnr_db(site for pair in pairs for site in pair))

    def _by_output(self, sites: Iterable[Site]) -> dict[str, float]:
        with self._engine(Placement(sites=frozenset(sites))) as engine:
            return self._gate.by_output(engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A model with the sites and numbers of a placement; ``given`` is the file of the model without pairs."""

    model: Model
    given: Path
    numbers: SchemeNumbers
    sites: frozenset[Site]
    floating: frozenset[Site]


def _rehearsed(opened: ExitStack, parts: _Parts, runtime: Runtime) -> _Engines:
    """Runs placements in one graph. Raises `RehearsalRefusedError` if the model cannot be rehearsed."""
    sites, numbers = tuple(parts.sites), parts.numbers
    subject = Subject(model=parts.model, sites=sites, numbers=numbers, feeds=tuple, floating=parts.floating)
    rehearsal = opened.enter_context(Rehearsal(subject, runtime))
    return lambda placement: nullcontext(RehearsedEngine(rehearsal, placement))


def _built(opened: ExitStack, parts: _Parts, build: Callable[[Path], Engine]) -> _Engines:
    """Builds each placement, and closes it after use."""
    folder = opened.enter_context(TemporaryFolder())
    store = WeightStore(folder, base=parts.given.parent)
    inserter = Inserter(parts.model, parts.numbers, floating=parts.floating, store=store)
    write = CandidateFiles(folder, parts.given, lambda placement: inserter.insert(placement).parts)
    return lambda placement: closing(build(write(placement)))


def _together(model: Model, sites: frozenset[Site]) -> list[Pairs]:
    """The pairs in graph order of their readers; a bias is grouped with the weight of its node."""
    biases = {site.consumers[0].node: site for site in sites if site.format == BIAS_FORMAT}
    found: list[Pairs] = []

    def place(site: Site) -> tuple[int, str]:
        readers = (model.by_name[end.node].index for end in site.consumers if end.node in model.by_name)
        return min(readers, default=0), site.row

    for site in sorted(sites, key=place):
        if site.format != BIAS_FORMAT:
            bias = biases.pop(site.consumers[0].node, None) if site.weight and site.consumers else None
            found.append((site,) if bias is None else (site, bias))
    return found + [(site,) for site in biases.values()]


def _noisiest(measure: _Measure, most: int | None, seconds: float | None) -> tuple[list[Culprit], float]:
    """The pairs with the largest error, limited by number and time, and the share of all others."""
    stop = math.inf if seconds is None else time.monotonic() + seconds
    ranked = Noisiest(measure.pairs, measure.power, most)
    powers: list[tuple[Pairs, float]] = []
    for pair, power in ranked:
        powers.append((pair, power))
        if len(powers) == most or time.monotonic() > stop:
            break
    whole = math.fsum(power for _, power in powers) + ranked.rest
    share = [power / whole if whole else 0.0 for _, power in powers]
    found = [
        Culprit(site=pair[0], alone_db=min(sqnr_db(1.0, power), MOST_DB), share=part)
        for (pair, power), part in zip(powers, share, strict=True)
    ]
    return found, max(0.0, 1 - math.fsum(share)) if whole else 0.0


def _with_removals(measure: _Measure, found: Sequence[Culprit]) -> Iterator[Culprit]:
    """The pairs; the first few with the SQNR that remains when their readers and those of all before read floats."""
    without: set[str] = set()  # nodes; the empty name represents graph outputs
    for number, culprit in enumerate(found):
        if number >= REMOVED:
            yield culprit
            continue
        without.update(end.node for end in culprit.site.consumers)
        yield replace(culprit, without_db=measure.sqnr_db(_without(measure.sites, without)))


def _without(sites: frozenset[Site], nodes: set[str]) -> Iterator[Site]:
    """The sites without the consumers in these nodes."""
    for site in sites:
        left = tuple(end for end in site.consumers if end.node not in nodes)
        if left:
            yield site if len(left) == len(site.consumers) else replace(site, consumers=left)


# Branch and bound for the items with the largest noise, by measuring groups of items. Pure.

T = TypeVar("T")


class Noisiest(Generic[T]):
    """Items by falling noise, as many as are iterated, each with the noise power that ``measure`` returns for it alone.

    Noise powers are additive, so that a group has at least the noise of its noisiest member: the noisiest
    group is divided until it is one item, which no other can exceed (branch and bound). A few of n items take
    about their number times 2 log n measurements; if more than that are wanted, each item is measured at
    once, which takes n.
    """

    def __init__(
        self, items: Sequence[T], measure: Callable[[Sequence[T]], float], wanted: int | None = None
    ) -> None:
        self._measure = measure
        self._groups: list[tuple[float, int, Sequence[T]]] = []  # a heap: the noisiest first
        self._measured = 0
        are_few = wanted is not None and 2 * wanted * math.log2(max(len(items), 1)) < len(items)
        size = math.ceil(len(items) / 2) if are_few else 1
        for start in range(0, len(items), size):
            self._add(items[start : start + size])

    def __iter__(self) -> Iterator[tuple[T, float]]:
        while self._groups:
            power, _, group = heapq.heappop(self._groups)
            if len(group) == 1:
                yield group[0], -power
            else:
                middle = len(group) // 2
                self._add(group[:middle])
                self._add(group[middle:])

    @property
    def rest(self) -> float:
        """Noise power of all items not yet returned."""
        return math.fsum(-power for power, _, _ in self._groups)

    def _add(self, group: Sequence[T]) -> None:
        heapq.heappush(self._groups, (-self._measure(group), self._measured, group))
        self._measured += 1
