"""Error attribution: ranks Q/DQ pairs by the accuracy they cost, and measures the SQNR without them.

The default backend computes everything without optimization, also if the case names another backend: parts of the
placement are rehearsed in one graph.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec.accuracy.compare import power_of
from qdqspec.accuracy.compare import sqnr_db as ratio_db
from qdqspec.accuracy.evaluator import MOST_DB, Evaluator
from qdqspec.accuracy.rehearsal import Rehearsal, RehearsalRefusedError, RehearsedEngine, Subject
from qdqspec.app.preparation.auxiliary_runs import reference_runtime
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model
from qdqspec.qdq.chains import Equalization
from qdqspec.qdq.formats import BIAS_FORMAT
from qdqspec.qdq.match import fit_pairs, prepared_for
from qdqspec.qdq.scheme_file import SchemeNumbers
from qdqspec.types import Culprit, CulpritEvidence, PlacedPair, Placement, Site

MOST = 12  # pairs listed by default

Pairs = tuple[Site, ...]  # a pair and its dependents: a weight with its bias
T = TypeVar("T")


def culprits_of(
    prepared: Prepared,
    pairs: Sequence[PlacedPair],
    output: str | None = None,
    *,
    factors: Sequence[Equalization] = (),
    most: int | None = MOST,
    seconds: float | None = None,
) -> CulpritEvidence:
    """The pairs in the model of a case with the largest error, measured at ``output`` or else at the worst output.

    The pairs are measured on the best data available. ``most`` is the number of pairs, all for ``None``. ``seconds``
    limits the time; the pairs found within the time are returned. Scales and zero points of the pairs belong to the
    model with ``factors``. If the default backend cannot compute the model, or memory is short, ``missing`` states so.
    """
    if not pairs:
        return CulpritEvidence(missing="nothing is quantized")
    limits = [limit for limit in (seconds, prepared.resources.seconds_left()) if limit is not None]
    stop = time.monotonic() + min(limits, default=math.inf)
    feeds, data = prepared.comparison_data()
    model, _ = prepared_for(prepared.base, pairs, factors=factors)
    fitting = fit_pairs(model, pairs).pairs
    sites = frozenset(pair.site for pair in fitting)
    groups = _group_pairs(model, sites)
    subject = Subject(
        model=model,
        sites=tuple(sites),
        numbers=SchemeNumbers(model, fitting),
        feeds=tuple,
        floating=frozenset(pair.site for pair in fitting if not pair.stored),
    )
    try:
        with (
            ExitStack() as opened,
            Rehearsal(subject, reference_runtime(opened, prepared.options)) as rehearsal,
        ):

            def engine(some: Iterable[Site]) -> RehearsedEngine:
                return rehearsal.engine(Placement(sites=frozenset(some)))

            evaluator = Evaluator(feeds, lambda: engine(()))
            together = evaluator.by_output(engine(sites))
            worst = min(together, key=together.__getitem__, default="")
            measured = output if output is not None and output in together else worst

            def sqnr_db(some: Iterable[Site]) -> float:
                return evaluator.by_output(engine(some)).get(measured, MOST_DB)

            def power(some: Iterable[Pairs]) -> float:
                return power_of(sqnr_db(site for pair in some for site in pair))

            found, rest = noisiest(groups, power, most, stop)
            whole = math.fsum(alone for _, alone in found) + rest
            culprits = tuple(_measure_culprits(found, whole, sites, sqnr_db))
    except (BackendError, RehearsalRefusedError) as error:
        return CulpritEvidence(missing=f"{DEFAULT_BACKEND} does not compute it: {error.what}")
    return CulpritEvidence(
        output=measured,
        pairs=culprits,
        total=len(groups),
        rest=rest / whole if whole else 0.0,
        together_db=together.get(measured, MOST_DB),
        samples=evaluator.samples,
        data=data,
        missing="" if len(found) == min(most or math.inf, len(groups)) else "the time was over",
    )


def _group_pairs(model: Model, sites: frozenset[Site]) -> list[Pairs]:
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


def noisiest(
    items: Sequence[T],
    power: Callable[[Sequence[T]], float],
    most: int | None = None,
    stop: float = math.inf,
) -> tuple[list[tuple[T, float]], float]:
    """The items with the largest noise, each with the ``power`` of it alone, and the noise power of all others.

    Noise powers add, so that a group has at least the noise of each member: the noisiest group is halved until it is
    one item, which no other can exceed (branch and bound). A few of n items take about their number times 2 log n
    measurements. If that is more than n, each item is measured alone. There is at least one item; no further one
    after the time ``stop``.
    """
    is_few = most is not None and 2 * most * math.log2(max(len(items), 1)) < len(items)
    groups: list[tuple[float, int, Sequence[T]]] = []  # a heap, the noisiest first
    found: list[tuple[T, float]] = []
    pending = [items] if is_few else [items[index : index + 1] for index in range(len(items))]
    numbers = itertools.count()
    while pending or groups:
        for group in pending:
            heapq.heappush(groups, (-power(group), next(numbers), group))
        negative, _, group = heapq.heappop(groups)
        middle = len(group) // 2
        pending = [group[:middle], group[middle:]] if middle else []
        if not middle:
            found.append((group[0], -negative))
            if len(found) == most or time.monotonic() > stop:
                break
    return found, math.fsum(-negative for negative, *_ in groups)


def _measure_culprits(
    found: Sequence[tuple[Pairs, float]],
    whole: float,
    sites: frozenset[Site],
    sqnr_db: Callable[[Iterable[Site]], float],
    removed: int = 3,
) -> Iterator[Culprit]:
    """The pairs, with their share of the ``whole`` noise.

    For each of the first ``removed`` pairs one more measurement gives the SQNR of the model in which the readers of
    this pair and of all pairs before it read floats.
    """
    without: set[str] = set()  # nodes; the empty name represents graph outputs
    for number, (pair, power) in enumerate(found):
        alone_db, share = min(ratio_db(1.0, power), MOST_DB), power / whole if whole else 0.0
        without.update(end.node for end in pair[0].consumers)
        without_db = sqnr_db(_remove_readers(sites, without)) if number < removed else None
        yield Culprit(site=pair[0], alone_db=alone_db, share=share, without_db=without_db)


def _remove_readers(sites: frozenset[Site], nodes: set[str]) -> Iterator[Site]:
    """The sites without the consumers in these nodes."""
    for site in sites:
        left = tuple(end for end in site.consumers if end.node not in nodes)
        if left:
            yield site if len(left) == len(site.consumers) else replace(site, consumers=left)
