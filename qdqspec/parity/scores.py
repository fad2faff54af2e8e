"""Task metrics of the models of one case, on its evaluation data.

Data and metrics are validated before anything is built, so that a typing error is reported before the search.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

from qdqspec.arrays import Array
from qdqspec.backends.base import Engine
from qdqspec.errors import ConfigError, DataError, QdqspecError
from qdqspec.parity.data import Dataset
from qdqspec.parity.gate import Runs
from qdqspec.parity.metrics import Score, evaluate, require_metric
from qdqspec.spec.problems import source_lines
from qdqspec.types import AccuracyEvidence, Case, Metric
from qdqspec.units import count_text


@dataclass
class Scores:
    """Scores engines by the metrics of a case: its own and the built-in ones.

    ``reference`` is the user's model, ``open_data`` gives the evaluation data or ``None``, ``build`` an engine;
    ``note`` receives notes for the user.
    """

    case: Case
    reference: Path
    open_data: Callable[[], Dataset | None]
    build: Callable[[Path], Engine]
    note: Callable[[str], None] = lambda _: None
    _known: dict[tuple[Path, str, str | None], Score | QdqspecError] = field(default_factory=dict, init=False)

    def require(self, metric: str, *, line: int | None = None) -> None:
        """Raise `QdqspecError` if a metric cannot be computed; ``line`` is the line of the spec that names it."""
        try:
            require_metric(metric, self.case.metrics)
        except QdqspecError as error:
            raise type(error)(
                error.what, where=self._place(line or self._line(metric)), cure=error.cure
            ) from None
        if self._data is None:
            raise DataError(
                "accuracy is asked for, and there is no evaluation data",
                where=self._place(line),
                cure="name data with inputs and labels in inputs.evaluation",
            )
        self._data.require_labels()

    @property
    def feeds(self) -> int:
        """The number of runs of a score; 0 without data."""
        return 0 if self._data is None else len(self._data)

    @property
    def samples(self) -> int:
        """The number of samples of a score; 0 without data."""
        return 0 if self._data is None else self._data.samples

    def of_engine(
        self, engine: Runs, metric: str, output: str | None = None, *, feeds: int | None = None
    ) -> Score:
        """Run an engine on all samples, or on the first ``feeds``.

        Raises as `evaluate` does, and `BackendError` if the engine does not run.
        """
        self.require(metric)
        assert self._data is not None
        try:
            outputs, samples = self._outputs(engine, output, feeds)
            labels = self._labels[:samples]
            return evaluate(metric, outputs, labels, output=output, own=self.case.metrics)
        except DataError as error:
            raise DataError(error.what, where=error.where or self._data.path, cure=error.cure) from error

    def _outputs(
        self, engine: Runs, output: str | None, feeds: int | None
    ) -> tuple[Iterator[Mapping[str, Array]], int]:
        """Outputs for each feed, and the number of samples; without those that only pad the last batch.

        If an output has no batch axis, the padding cannot be removed: then the last batch is not scored.
        """
        data = self._data
        assert data is not None
        if feeds is not None and feeds < len(data):
            return map(engine.run, islice(data, feeds)), feeds * data.batch
        runs = map(engine.run, data)
        rest = data.samples % data.batch
        if rest == 0:
            return runs, data.samples
        first = next(runs)
        used = [first[output]] if output in first else [*first.values()]
        every = chain([first], runs)
        if all(value.ndim and len(value) == data.batch for value in used):
            return _first_samples(every, data.samples, data.batch), data.samples
        if data.samples < data.batch:
            raise DataError(
                f"{count_text(data.samples, 'sample')} do not fill a batch of {data.batch}, and the outputs are not "
                "divided by samples",
                cure="give at least as many samples as the batch has",
            )
        self.note(
            f"the last {count_text(rest, 'sample')} of {data.samples} do not fill a batch of {data.batch} and are not "
            "scored: the outputs are not divided by samples"
        )
        return islice(every, data.samples // data.batch), data.samples - rest

    def of_file(self, path: Path, metric: str, output: str | None = None) -> Score:
        """Build a model and score it; each file once, errors included."""
        key = path, metric, output
        if key not in self._known:
            self.require(metric)
            try:
                with closing(self.build(path)) as engine:
                    self._known[key] = self.of_engine(engine, metric, output)
            except QdqspecError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, QdqspecError):
            raise found
        return found

    def of_reference(self, metric: str, output: str | None = None) -> Score:
        """The score of the user's own model; raises `DataError` if it is not finite."""
        score = self.of_file(self.reference, metric, output)
        if not math.isfinite(score.value):
            raise DataError(
                f"metric '{metric}' gave {score.value} for the model itself, so that no limit can be applied",
                where=None if self._data is None else self._data.path,
                cure="look at its outputs and labels, or use another metric",
            )
        return score

    @cached_property
    def _data(self) -> Dataset | None:
        return self.open_data()

    @cached_property
    def _labels(self) -> Array:
        assert self._data is not None
        return self._data.require_labels()

    def _line(self, metric: str) -> int | None:
        """The first line of the spec that names a metric."""
        spec = self.case.spec
        if spec is None or not spec.is_file():
            return None
        lines = source_lines(spec.read_text(encoding="utf-8", errors="replace"))
        return next((number for number, text in enumerate(lines, 1) if metric in text), None)

    def _place(self, line: int | None) -> str:
        where = self.case.spec or self.case.model
        return f"{where}:{line}" if line is not None and self.case.spec else str(where)


def _first_samples(
    outputs: Iterable[Mapping[str, Array]], samples: int, batch: int
) -> Iterator[Mapping[str, Array]]:
    """The outputs of the first ``samples`` samples, without the padding of the last batch."""
    for number, found in enumerate(outputs):
        left = min(batch, samples - number * batch)
        yield {
            name: value[:left] if value.ndim and len(value) == batch else value
            for name, value in found.items()
        }


def accuracy_evidence(metric: str, reference: Score, tuned: Score) -> AccuracyEvidence:
    """Two scores compared; also sample by sample, if the metric supports it."""
    lost = gained = None
    if reference.right is not None and tuned.right is not None:
        lost = int((reference.right & ~tuned.right).sum())
        gained = int((tuned.right & ~reference.right).sum())
    return AccuracyEvidence(
        metric=metric,
        reference=reference.value,
        tuned=tuned.value,
        samples=reference.samples,
        lost=lost,
        gained=gained,
    )


def joined_metrics(*given: Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics of several sources; later ones win. Raises `ConfigError` for a value that is not a metric."""
    for metrics in given:
        # A fixture may return anything, whatever its annotation.
        if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
            raise ConfigError(
                f"metrics are a mapping of names to functions, and these are {metrics!r:.60}",
                cure="return {'name': function} from fixture qdq_metrics, or give metrics={...} to the session",
            )
    return {name: metric for metrics in given for name, metric in metrics.items()}
