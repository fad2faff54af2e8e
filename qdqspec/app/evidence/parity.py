"""Parity of a model and its tuned model: their outputs on the same inputs, and the Q/DQ pairs that cost most of it.

The outputs are also compared with the exact Q/DQ arithmetic. Pairs are ranked by rehearsing parts of a placement in one
graph, on the default backend without optimization, also if the case names another backend.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.files import Closing
from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec.accuracy import (
    Dataset,
    Evaluator,
    Rehearsal,
    RehearsalRefusedError,
    RehearsedEngine,
    SampleOutputs,
    compare_outputs,
    power_of,
    sqnr_db as ratio_db,
    without_fill,
)
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import (
    ARITHMETIC,
    Definition,
    Resources,
    has_foreign_pairs,
    reference_runtime,
    runner,
)
from qdqspec.backends import Engine
from qdqspec.checks import requests_of
from qdqspec.errors import BackendError, ModelError
from qdqspec.graph import Model, load_model, require_path
from qdqspec.qdq import BIAS_FORMAT, Equalization, SchemeNumbers, fit_scheme
from qdqspec.types import (
    EXACT_DB,
    Culprit,
    CulpritEvidence,
    ParityEvidence,
    PlacedPair,
    Placement,
    Site,
    TopK,
)
from qdqspec.types.requests import ParityRequest


class SideBySide(Closing):
    """The float model and the tuned model on the backend, and the tuned model as ONNX defines it, each built once.

    The float model is also fed ``fixed``, for which the tuned model has no inputs. ``expected`` builds the engine to
    compare with if the backend does not compute the float model as ONNX defines it.
    The third engine is `Definition`. If it cannot run the model, ``undivided`` states why from then on. Where the
    backend runs nothing, both models are computed as ONNX defines them. An engine that fails on an input is rebuilt for
    the next one. If both models are one file, it runs once.
    """

    def __init__(
        self,
        resources: Resources,
        reference: Path,
        tuned: Path,
        fixed: Mapping[str, Array] | None = None,
        *,
        expected: Callable[[], Engine] | None = None,
        divided: bool = True,
    ) -> None:
        self.undivided = "" if divided else "no check of parity asks for it"
        self._fixed = {} if expected else dict(fixed or {})
        self._opened = ExitStack()
        options = replace(resources.options, hashed=False)
        build = runner(resources.backend, options)
        self._reference = self._opened.enter_context(_Rebuilt(expected or (lambda: build(reference))))
        self._tuned = self._opened.enter_context(_Rebuilt(lambda: build(tuned)))
        self._is_same = tuned == reference and not self._fixed and not expected
        self._arithmetic: _Rebuilt | None = None
        if not resources.backend.capabilities(options).runs:
            self.undivided = (
                f"{resources.backend.name} runs nothing on this machine: {ARITHMETIC} computed both models as ONNX "
                "defines them"
            )
        elif divided and not self._is_same:

            def build_definition() -> Engine:
                self._definition = Definition(load_model(tuned), resources.backend, resources.options)
                return self._definition.build()

            self._arithmetic = self._opened.enter_context(_Rebuilt(build_definition))

    def run(self, feeds: Mapping[str, Array]) -> SampleOutputs:
        """The outputs for one input; raises `BackendError` if a model does not run on it."""
        expected = self.reference(feeds)
        tuned = expected if self._is_same else self.tuned(feeds)
        return SampleOutputs(expected, tuned, self._computed(feeds))

    def runs(
        self, feeds: Iterable[Mapping[str, Array]], held_bytes: int = 64 * 2**20
    ) -> Iterator[SampleOutputs]:
        """The outputs for all inputs, in order. Raises like `run`.

        Each engine processes a batch of inputs before the next engine starts; inputs and outputs of a batch take
        ``held_bytes``. If the batch holds all inputs, an engine is closed before the next is built: unfused, one model
        takes more than twice its weights.
        """
        left, is_all = iter(feeds), False
        while not is_all:
            batch, references = list[Mapping[str, Array]](), list[Mapping[str, Array]]()
            size, is_all = 0, True
            for given in left:
                batch.append(given)
                references.append(self.reference(given))
                size += _bytes(given) + len(SampleOutputs._fields) * _bytes(references[-1])
                if size > held_bytes:
                    is_all = False
                    break
            if is_all:
                self._reference.close()
            tuned = references if self._is_same else [self.tuned(each) for each in batch]
            if is_all:
                self._tuned.close()
            yield from map(SampleOutputs, references, tuned, [self._computed(each) for each in batch])

    def reference(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of the float model only."""
        return self._reference.run({**feeds, **self._fixed})

    def tuned(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of the tuned model only."""
        return self._tuned.run(feeds)

    def close(self) -> None:
        """Close all engines."""
        self._opened.close()

    def _computed(self, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        if self._arithmetic is None:
            return None
        try:
            return self._arithmetic.run(feeds)
        except (BackendError, ModelError) as error:
            self.undivided = f"{ARITHMETIC} does not compute it unfused: {error.what}"
            self._arithmetic = None
            return None


class _Rebuilt(Closing):
    """An engine that is built on first use, and again after a failure."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self._engine: Engine | None = None

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        if self._engine is None:
            self._engine = self._build()
        try:
            return self._engine.run(feeds)
        except BackendError:
            self.close()
            raise

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _bytes(arrays: Mapping[str, Array]) -> int:
    return sum(array.nbytes for array in arrays.values())


def compare_models(prepared: Prepared, tuned: Path, *, divided: bool = True) -> ParityEvidence:
    """Compare the outputs of a model with the outputs of the given model, on the best data available.

    The given model is the user's own file, fed the values of the inputs that the case fixes. ``divided`` also compares
    both with the Q/DQ arithmetic as ONNX defines it.
    """
    prepared.resources.report_step("comparing outputs")
    computed_by = ""  # the runtimes that compute both models as ONNX defines them
    if not prepared.capabilities.runs:
        both = f"{ARITHMETIC} and ONNX's reference implementation"
        computed_by = both if has_foreign_pairs(tuned) else ARITHMETIC
    feeds, kind = prepared.comparison_data()
    with both_models(prepared, tuned, divided=divided) as models:
        requests = (request for check in prepared.case.checks for request in requests_of(check))
        asked = (request.top for request in requests if isinstance(request, ParityRequest))
        top = tuple(dict.fromkeys((TopK(), *asked)))  # the best class is always compared
        runs = enumerate(models.runs(feeds))
        samples = (sample for number, run in runs for sample in by_sample(feeds, number, run))
        return replace(
            compare_outputs(samples, kind, top),
            undivided=models.undivided,
            computed_by=computed_by,
            definition=prepared.definition,
        )


def by_sample(data: Iterable[Feed], number: int, run: SampleOutputs) -> Iterator[SampleOutputs]:
    """The outputs for each sample of a feed, without those that only fill up the last one.

    A feed whose outputs are not all divided by samples counts as one sample.
    """
    whole = SampleOutputs._make(outputs and without_fill(data, number, outputs) for outputs in run)
    if not divided_batch(data, number, run):
        yield whole
        return
    for row in range(min(map(len, whole.reference.values()))):
        yield SampleOutputs._make(
            outputs and {name: np.atleast_1d(value)[row : row + 1] for name, value in outputs.items()}
            for outputs in whole
        )


def divided_batch(data: Iterable[Feed], number: int, run: SampleOutputs) -> int:
    """The number of samples in a batch of which each output has one row a sample; 0 for others."""
    batch = max(data.batch, data.rows[number]) if isinstance(data, Dataset) else 1
    return batch if batch > 1 and {v.shape[:1] for v in run.reference.values()} == {(batch,)} else 0


def both_models(prepared: Prepared, tuned: Path, *, divided: bool = True) -> SideBySide:
    """The given model of a case, or its definition where the backend's run of it differs, and a tuned model."""
    # inputs with a fixed value, which the user's own model is fed in addition to the data
    fixed = {} if prepared.quantized else prepared.given.fixed
    reference = prepared.case.model.absolute() if fixed else require_path(prepared.given)
    expected = prepared.expected
    return SideBySide(prepared.resources, reference, tuned, fixed, expected=expected, divided=divided)


@dataclass(frozen=True, slots=True, kw_only=True)
class BothModels:
    """Reference and tuned model of a case as `ComparedModels`."""

    prepared: Prepared
    tuned: Path

    @property
    def reference(self) -> Path:
        """The reference's file."""
        return require_path(self.prepared.given)

    def outputs(self) -> Iterator[tuple[Mapping[str, Array], Mapping[str, Array], Mapping[str, Array]]]:
        """For each input: its arrays, the reference's outputs, and the tuned model's."""
        feeds, _ = self.prepared.comparison_data()
        with both_models(self.prepared, self.tuned, divided=False) as models:
            for number, given in enumerate(feeds):
                run = given, models.reference(given), models.tuned(given)
                inputs, reference, tuned = (without_fill(feeds, number, arrays) for arrays in run)
                yield inputs, reference, tuned


MOST = 12  # pairs listed by default
Pairs = tuple[Site, ...]  # a pair and its dependents: a weight with its bias
T = TypeVar("T")


def culprits_of(
    prepared: Prepared,
    pairs: Sequence[PlacedPair],
    output: str | None = None,
    *,
    factors: Sequence[Equalization] = (),
    quantized: Model | None = None,
    most: int | None = MOST,
    seconds: float | None = None,
) -> CulpritEvidence:
    """The pairs in the model of a case with the largest error, measured at ``output`` or else at the worst output.

    The pairs are measured on the best data available. ``most`` is the number of pairs, all for ``None``. ``seconds``
    limits the time; the pairs found within the time are returned. Scales and zero points of the pairs belong to the
    model with ``factors``. The model ``quantized``, from which the pairs were read, is measured too. If the default
    backend cannot compute the model, or memory is short, ``missing`` states so.
    """
    if not pairs:
        return CulpritEvidence(missing="no pair that a scheme can carry is in it")
    limits = [limit for limit in (seconds, prepared.resources.seconds_left()) if limit is not None]
    stop = time.monotonic() + min(limits, default=math.inf)
    feeds, data = prepared.comparison_data()
    fitted = fit_scheme(prepared.base, pairs, factors=factors)
    model, fitting = fitted.model, fitted.pairs
    sites = frozenset(pair.site for pair in fitting)
    groups = _group_pairs(model, sites)
    numbers, floating = SchemeNumbers(model, fitting), (pair.site for pair in fitting if not pair.stored)
    try:
        with (
            ExitStack() as opened,
            Rehearsal(
                model, sites, numbers, tuple, reference_runtime(opened, prepared.options), floating=floating
            ) as rehearsal,
        ):

            def engine(some: Iterable[Site]) -> RehearsedEngine:
                return rehearsal.engine(Placement(sites=frozenset(some)))

            evaluator = Evaluator(feeds, lambda: engine(()))
            together = evaluator.by_output(engine(sites))
            worst = min(together, key=together.__getitem__, default="")
            measured = output if output is not None and output in together else worst

            def sqnr_db(some: Iterable[Site]) -> float:
                return evaluator.by_output(engine(some)).get(measured, EXACT_DB)

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
        together_db=together.get(measured, EXACT_DB),
        samples=evaluator.samples,
        data=data,
        model_db=None if quantized is None else _measure_model_db(prepared, quantized, feeds, measured),
        missing="" if len(found) == min(most or math.inf, len(groups)) else "the time was over",
    )


def _measure_model_db(
    prepared: Prepared, quantized: Model, feeds: Iterable[Feed], output: str
) -> float | None:
    """The SQNR of a quantized model as ONNX defines it, at an output; ``None`` if it does not run on these inputs."""
    definition = Definition(quantized, prepared.backend, prepared.options)
    try:
        with closing(definition.build()) as engine:
            return Evaluator(feeds, prepared.build_expected).by_output(engine).get(output)
    except BackendError:
        return None


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
        alone_db, share = min(ratio_db(1.0, power), EXACT_DB), power / whole if whole else 0.0
        without.update(end.node for end in pair[0].consumers)
        without_db = None
        if number < removed:
            left = {site: tuple(end for end in site.consumers if end.node not in without) for site in sites}
            without_db = sqnr_db(replace(site, consumers=ends) for site, ends in left.items() if ends)
        yield Culprit(site=pair[0], alone_db=alone_db, share=share, without_db=without_db)
