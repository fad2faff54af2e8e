"""Parity of a model and its tuned model: their outputs on the same inputs, and the Q/DQ pairs that cost most of it.

The outputs are also compared with the exact Q/DQ arithmetic. Pairs are ranked by rehearsing parts of a placement in one
graph, on the default backend without optimization, also if the case names another backend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from qdqspec._core.arrays import Array, Feed
from qdqspec._core.files import Closing
from qdqspec.accuracy import (
    Evaluator,
    RehearsalRefusedError,
    SampleOutputs,
    compare_outputs,
    rank_pairs,
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
from qdqspec.checks import requested
from qdqspec.errors import BackendError, ModelError
from qdqspec.graph import Model, load_model, require_path
from qdqspec.qdq import SchemeFile
from qdqspec.types import (
    CulpritEvidence,
    ParityEvidence,
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
        self.is_same = tuned == reference and not self._fixed and not expected
        self._arithmetic: _Rebuilt | None = None
        if not resources.backend.capabilities(options).runs:
            self.undivided = (
                f"{resources.backend.name} runs nothing on this machine: {ARITHMETIC} computed both models as ONNX "
                "defines them"
            )
        elif divided and not self.is_same:

            def build_definition() -> Engine:
                self._definition = Definition(load_model(tuned), resources.backend, resources.options)
                return self._definition.build()

            self._arithmetic = self._opened.enter_context(_Rebuilt(build_definition))

    def run(self, feeds: Mapping[str, Array]) -> SampleOutputs:
        """The outputs for one input; raises `BackendError` if a model does not run on it."""
        expected = self.reference(feeds)
        tuned = expected if self.is_same else self.tuned(feeds)
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
            tuned = references if self.is_same else [self.tuned(each) for each in batch]
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


def compare_models(prepared: Prepared, tuned: Path, *, divided: bool = True, same: int = 8) -> ParityEvidence:
    """Compare the outputs of a model with the outputs of the given model, on the best data available.

    The given model itself is run on the first ``same`` inputs only: more would be equal too.

    The given model is the user's own file, fed the values of the inputs that the case fixes. ``divided`` also compares
    both with the Q/DQ arithmetic as ONNX defines it.
    """
    prepared.resources.report_step("comparing outputs")
    computed_by = ""  # the runtimes that compute both models as ONNX defines them
    if not prepared.capabilities.runs:
        both = f"{ARITHMETIC} and ONNX's reference implementation"
        computed_by = both if has_foreign_pairs(tuned) else ARITHMETIC
    feeds, kind = prepared.data.for_comparison()
    with both_models(prepared, tuned, divided=divided) as models:
        asked = (request.top for request in requested(prepared.case.checks, ParityRequest))
        top = tuple(dict.fromkeys((TopK(), *asked)))  # the best class is always compared
        return replace(
            compare_outputs(
                models.runs(islice(feeds, same if models.is_same else None)), kind, top, feeds=feeds
            ),
            undivided=models.undivided,
            computed_by=computed_by,
            definition=prepared.definition,
        )


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
        feeds, _ = self.prepared.data.for_comparison()
        with both_models(self.prepared, self.tuned, divided=False) as models:
            for number, given in enumerate(feeds):
                run = given, models.reference(given), models.tuned(given)
                inputs, reference, tuned = (without_fill(feeds, number, arrays) for arrays in run)
                yield inputs, reference, tuned


MOST = 12  # pairs listed by default


def culprits_of(
    prepared: Prepared,
    scheme: SchemeFile,
    output: str | None = None,
    *,
    quantized: Model | None = None,
    most: int | None = MOST,
    seconds: float | None = None,
) -> CulpritEvidence:
    """The pairs of a scheme with the largest error in the model of a case, at ``output`` or else at the worst output.

    The pairs are measured on the best data available. ``most`` is the number of pairs, all for ``None``. ``seconds``
    limits the time; the pairs found within the time are returned. The model ``quantized``, from which the pairs were
    read, is measured too. If the default backend cannot compute the model, or memory is short, ``missing`` states so.
    """
    if not scheme.pairs:
        return CulpritEvidence(missing="no pair that a scheme can carry is in it")
    limits = [limit for limit in (seconds, prepared.resources.seconds_left()) if limit is not None]
    stop = time.monotonic() + min(limits, default=math.inf)
    (feeds, data), base = prepared.data.for_comparison(), prepared.base
    try:
        with ExitStack() as opened:
            found = rank_pairs(
                base,
                scheme.pairs,
                feeds,
                reference_runtime(opened, prepared.options),
                output=output,
                factors=scheme.equalized,
                most=most,
                stop=stop,
            )
    except (BackendError, RehearsalRefusedError) as error:
        return CulpritEvidence(missing=f"{ARITHMETIC} does not compute it: {error.what}")
    model_db = None if quantized is None else _measure_model_db(prepared, quantized, feeds, found.output)
    return replace(found, data=data, model_db=model_db)


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
