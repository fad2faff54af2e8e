"""Runs a model, its tuned model and the tuned model's exact Q/DQ arithmetic on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from qdqspec._core.arrays import Array
from qdqspec._core.files import Closing
from qdqspec.accuracy.compare import SampleOutputs, compare_outputs
from qdqspec.app.preparation.auxiliary_runs import ARITHMETIC, Definition, runner
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.resources import Resources
from qdqspec.backends.base import Engine
from qdqspec.checks.base import requests_of
from qdqspec.errors import BackendError, ModelError
from qdqspec.graph.model import load_model, require_path
from qdqspec.types import ParityEvidence, TopK
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
        self._reference = self._engine(expected or (lambda: build(reference)))
        self._tuned = self._engine(lambda: build(tuned))
        self._is_same = tuned == reference and not self._fixed and not expected
        self._arithmetic: _Rebuilt | None = None
        if not resources.backend.capabilities(options).runs:
            self.undivided = (
                f"{resources.backend.name} runs nothing on this machine: {ARITHMETIC} computed both models as ONNX "
                "defines them"
            )
        elif divided and not self._is_same:
            self._arithmetic = self._engine(partial(self._build_definition, resources, tuned))

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

    def _build_definition(self, resources: Resources, model: Path) -> Engine:
        self._definition = Definition(load_model(model), resources.backend, resources.options)
        return self._definition.build()

    def _engine(self, build: Callable[[], Engine]) -> _Rebuilt:
        engine = _Rebuilt(build)
        self._opened.callback(engine.close)
        return engine

    def _computed(self, feeds: Mapping[str, Array]) -> dict[str, Array] | None:
        if self._arithmetic is None:
            return None
        try:
            return self._arithmetic.run(feeds)
        except (BackendError, ModelError) as error:
            self.undivided = f"{ARITHMETIC} does not compute it unfused: {error.what}"
            self._arithmetic = None
            return None


class _Rebuilt:
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
    feeds, kind = prepared.comparison_data()
    with both_models(prepared, tuned, divided=divided) as models:
        requests = (request for check in prepared.case.checks for request in requests_of(check))
        asked = (request.top for request in requests if isinstance(request, ParityRequest))
        top = tuple(dict.fromkeys((TopK(), *asked)))  # the best class is always compared
        return replace(
            compare_outputs(models.runs(feeds), kind, top),
            undivided=models.undivided,
            computed_by="" if prepared.capabilities.runs else ARITHMETIC,
            definition=prepared.definition,
        )


def both_models(prepared: Prepared, tuned: Path, *, divided: bool = True) -> SideBySide:
    """The given model of a case, or its definition where the backend's run of it differs, and a tuned model."""
    reference = prepared.case.model.absolute() if prepared.fixed else require_path(prepared.given)
    expected = prepared.expected
    return SideBySide(
        prepared.resources, reference, tuned, prepared.fixed, expected=expected, divided=divided
    )


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
            for given in feeds:
                yield given, models.reference(given), models.tuned(given)
