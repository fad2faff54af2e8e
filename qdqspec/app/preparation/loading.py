"""Lint with ONNX's checker, and with one load of the model by the runtime of each target that is installed here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from qdqspec._core import hooks
from qdqspec._core.arrays import Array
from qdqspec._core.files import TemporaryFolder
from qdqspec.accuracy.data import random_feeds
from qdqspec.accuracy.shapes import resolve_shapes, with_named_dimensions
from qdqspec.app.preparation.auxiliary_runs import compared_with_definition
from qdqspec.backends.base import PLAIN, Backend, BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.errors import BackendError, BackendUnavailableError, ModelError
from qdqspec.graph.check import type_problem
from qdqspec.graph.model import Model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.lint import lint_model
from qdqspec.qdq.lint.rules import CHECKER, LOAD, RUN, VALUES, named_node, with_refusals
from qdqspec.types import DEFAULT_MIN_SQNR_DB, Finding, Inputs, InputShape, LintTarget, ShapeProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class Linted:
    """The findings of a target, and one load of the model by its runtime, in a process of its own.

    ``missing`` is why there was no load.
    """

    findings: tuple[Finding, ...] = ()
    runtime: str = ""  # with its version
    missing: str = ""
    refusal: Finding | None = None

    @property
    def loaded(self) -> bool:
        """Whether the runtime took the model."""
        return not self.missing and self.refusal is None

    @property
    def note(self) -> str:
        """The runtime that judged the model, or the reason why none did."""
        if self.missing:
            return f"static rules only, not loaded: {self.missing}"
        if self.refusal is not None and self.refusal.id == VALUES.id:
            return f"{self.runtime} loaded it, and computes other values"
        return f"{self.runtime} {'loaded' if self.loaded else 'refused'} it"


def lint_and_load(
    model: Model,
    target: LintTarget,
    *,
    options: BuildOptions = PLAIN,
    feed: Mapping[str, Array] | None = None,
    loads: bool = True,
    compute_capability: tuple[int, int] | None = None,
) -> Linted:
    """The findings of `lint_model`, what ONNX's checker refuses, and what the runtime of the target refuses.

    The runtime loads the model if this machine has it in the version of the target, unless ``loads`` is false. It runs
    it once on ``feed``, by default random values, if a run without optimizations can tell faults of the optimizer from
    wrong values. What the checker refuses is a note if the runtime loads it. Raises `ConfigError` for unknown targets.
    """
    found = lint_model(model, target, compute_capability=compute_capability)
    load = load_for(model, target, options, feed) if loads else Linted(missing="not asked for")
    refusals = [] if load.refusal is None else [load.refusal]
    if problem := type_problem(model.proto):
        node = named_node(model, problem)
        checked = replace(CHECKER, severity="note" if load.loaded else "refused", node=node, message=problem)
        refusals.insert(0, checked)
    return replace(load, findings=with_refusals(found, refusals))


def load_for(
    model: Model, target: LintTarget, options: BuildOptions = PLAIN, feed: Mapping[str, Array] | None = None
) -> Linted:
    """Load a model once, by the backend that a lint target belongs to; without findings."""
    owner, wanted = hooks.owner_of(target), target.rpartition("-")[2]
    with closing(Isolated(owner)) as backend:
        found = backend.probe(options)
        if not found.usable:
            return Linted(missing=found.why)
        library, version = next(iter(found.facts.items()), (owner, ""))
        version = version.partition("-")[0]
        runtime = f"{library} {version}".strip()
        if wanted[:1].isdecimal() and not f"{version}.".startswith(f"{wanted}."):
            return Linted(missing=f"{runtime} is installed, not {wanted}")
        options, feed = _with_inputs(model, options, feed)
        if feed is None and not options.profiles and backend.capabilities(options).needs_shapes:
            return Linted(missing=f"{runtime} needs the size of each dimension of its inputs")
        started = time.monotonic()
        try:
            refusal = _refusal(model, backend, replace(options, state=None, hashed=False), feed)
        except BackendUnavailableError as error:
            return Linted(missing=error.what)
        if refusal is not None and time.monotonic() - started >= options.build_seconds:
            return Linted(missing=f"{runtime} took longer than {options.build_seconds:g} s")
    return Linted(runtime=runtime, refusal=refusal and replace(refusal, source=f"runtime: {runtime}"))


def _with_inputs(
    model: Model, options: BuildOptions, feed: Mapping[str, Array] | None
) -> tuple[BuildOptions, Mapping[str, Array] | None]:
    """The options with the shapes of the inputs, and an input; a random one if the size of each dimension is known."""
    if feed is None:
        try:
            shapes = resolve_shapes(model, with_named_dimensions(model, Inputs()))
        except ModelError:
            return options, None
        feed = next(iter(random_feeds(model, shapes, 0, 1)))
    if feed and not options.profiles:
        fixed = {name: InputShape.of(value.shape) for name, value in feed.items()}
        options = replace(options, profiles=(ShapeProfile(shapes=fixed),))
    return options, feed


def _refusal(
    model: Model, backend: Backend, options: BuildOptions, feed: Mapping[str, Array] | None
) -> Finding | None:
    """The refusal of the runtime, or values far from ONNX's definition; of runs that succeed without optimizations."""
    with TemporaryFolder() as folder:
        path = model.path or folder / "model.onnx"
        if model.path is None:
            save_model(model.proto, path)
        plain = hooks.declaration_of(backend.name).as_defined
        judges_runs = bool(plain) and feed is not None
        error, finding = _tried(backend, path, options, None), LOAD
        if error is None and judges_runs:
            error, finding = _tried(backend, path, options, feed), RUN
        if error is None:
            same = Model(model.proto, path=path)
            return _other_values(same, backend, options, feed) if judges_runs and feed is not None else None
        unoptimized = replace(options, extra={**options.extra, **plain})
        by_optimizer = bool(plain) and _tried(backend, path, unoptimized, feed) is None
        if finding is RUN and not by_optimizer:
            return None
        cure = RUN.cure if by_optimizer else error.cure or finding.cure
        words = " ".join(error.what.replace(str(path), "the model").split())
        return replace(finding, node=named_node(model, words), message=words, cure=cure)


def _other_values(
    model: Model, backend: Backend, options: BuildOptions, feed: Mapping[str, Array]
) -> Finding | None:
    found = compared_with_definition(model, [feed], backend, options)
    if found is None or found.sqnr_db >= DEFAULT_MIN_SQNR_DB:
        return None
    words = f"{found.sqnr_db:.1f} dB against its definition at output '{found.output}'"
    first = f", first at {found.node}" if found.node else ""
    return replace(VALUES, node=named_node(model, found.node), message=f"{words}{first}")


def _tried(
    backend: Backend, path: Path, options: BuildOptions, feed: Mapping[str, Array] | None
) -> BackendError | None:
    try:
        with closing(backend.build(path, options)) as engine:
            if feed is not None:
                engine.run(feed)
    except BackendUnavailableError:
        raise
    except BackendError as error:
        return error
    return None
