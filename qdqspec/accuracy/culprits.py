"""Ranks the Q/DQ pairs of a model by the accuracy they cost: parts of their placement are rehearsed in one graph."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from qdqspec._core.arrays import Feed
from qdqspec.accuracy.compare import power_of, sqnr_db as ratio_db
from qdqspec.accuracy.data import Dataset
from qdqspec.accuracy.evaluator import Evaluator
from qdqspec.accuracy.rehearsal import Rehearsal, RehearsedEngine, Runtime
from qdqspec.graph import Model
from qdqspec.qdq import Equalization, fit_scheme
from qdqspec.types import EXACT_DB, Culprit, CulpritEvidence, PlacedPair, Placement, Site

T = TypeVar("T")


def rank_pairs(
    model: Model,
    pairs: Sequence[PlacedPair],
    feeds: Iterable[Feed],
    runtime: Runtime,
    *,
    output: str | None = None,
    factors: Sequence[Equalization] = (),
    most: int | None = None,
    stop: float = math.inf,
    removed: int = 3,
) -> CulpritEvidence:
    """The pairs with the largest error, measured at ``output`` or else at the worst output, and the error of all.

    ``most`` is the number of pairs, all for ``None``. Pairs that are not found until the time ``stop`` are left out,
    which ``missing`` states. For each of the first ``removed`` pairs one more measurement gives the SQNR of the model
    in which the readers of this pair and of all pairs before it read floats. Scales and zero points of the pairs belong
    to the model with ``factors``. Raises `BackendError` or `RehearsalRefusedError` if the runtime does not compute the
    model.
    """
    fitted = fit_scheme(model, pairs, factors=factors)
    sites, groups = fitted.placement.sites, fitted.groups  # a pair and its dependents: a weight with its bias
    with Rehearsal(
        fitted.model, sites, fitted.numbers, tuple, runtime, floating=fitted.floating
    ) as rehearsal:

        def engine(some: Iterable[Site]) -> RehearsedEngine:
            return rehearsal.engine(Placement(sites=frozenset(some)))

        evaluator = Evaluator(feeds, lambda: engine(()))
        together = evaluator.by_output(engine(sites))
        worst = min(together, key=together.__getitem__, default="")
        measured = output if output is not None and output in together else worst

        def sqnr_db(some: Iterable[Site]) -> float:
            return evaluator.by_output(engine(some)).get(measured, EXACT_DB)

        def power(some: Iterable[tuple[Site, ...]]) -> float:
            return power_of(sqnr_db(site for pair in some for site in pair))

        found, rest = noisiest(groups, power, most, stop)
        whole = math.fsum(alone for _, alone in found) + rest
        culprits = list[Culprit]()
        without: set[str] = set()  # nodes; the empty name represents graph outputs
        for pair, alone in found:
            without.update(end.node for end in pair[0].consumers)
            without_db = None
            if len(culprits) < removed:
                left = {
                    site: tuple(end for end in site.consumers if end.node not in without) for site in sites
                }
                without_db = sqnr_db(replace(site, consumers=ends) for site, ends in left.items() if ends)
            alone_db, share = min(ratio_db(1.0, alone), EXACT_DB), alone / whole if whole else 0.0
            culprits.append(Culprit(site=pair[0], alone_db=alone_db, share=share, without_db=without_db))
    return CulpritEvidence(
        output=measured,
        pairs=tuple(culprits),
        total=len(groups),
        rest=rest / whole if whole else 0.0,
        together_db=together.get(measured, EXACT_DB),
        samples=sum(feeds.rows[: evaluator.samples]) if isinstance(feeds, Dataset) else evaluator.samples,
        missing="" if len(found) == min(most or math.inf, len(groups)) else "the time was over",
    )


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
