"""Evidence of builds: what a runtime refuses of a model, the kernels that it makes, and why candidates are slower.

A model is linted with ONNX's checker, and with one load by the runtime of each target that is installed here.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from qdqspec._core import hooks
from qdqspec._core.arrays import Array
from qdqspec._core.files import TemporaryFolder
from qdqspec.accuracy import CaseData
from qdqspec.app.evidence.explained import EngineComparison, ExplainedEngine, Row, op_of, short_place
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import compared_with_definition
from qdqspec.backends import PLAIN, Backend, BuildOptions, Isolated
from qdqspec.errors import BackendError, BackendUnavailableError, ConfigError, ModelError
from qdqspec.graph import Model, load_model, require_path, save_model
from qdqspec.graph.ops import HEAVY, MOVING_OPS, SHAPE_SOURCES
from qdqspec.qdq.lint import CHECKER, LOAD, RUN, VALUES, lint_model, named_node, with_refusals
from qdqspec.search import Confirmed, Limits
from qdqspec.types import (
    DEFAULT_MIN_SQNR_DB,
    FLOAT32,
    SLOWER,
    UNPROVED,
    BuildEvidence,
    Finding,
    Inputs,
    InputShape,
    Interval,
    KernelComparison,
    LayerTime,
    LintTarget,
    PlaceChange,
    PlacedPair,
    Placement,
    QuantizedWork,
    RejectedCandidate,
    ShapeProfile,
    Trial,
)
from qdqspec.types.requests import BuildRequest


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
    load = Linted(missing="not asked for")
    if loads:
        load = _load(model, target, options, feed, compute_capability)
    refusals = [] if load.refusal is None else [load.refusal]
    if problem := model.type_problem():
        node = named_node(model, problem)
        checked = replace(CHECKER, severity="note" if load.loaded else "refused", node=node, message=problem)
        refusals.insert(0, checked)
    return replace(load, findings=with_refusals(found, refusals))


def _load(
    model: Model,
    target: LintTarget,
    options: BuildOptions,
    feed: Mapping[str, Array] | None,
    gpu: tuple[int, int] | None,
) -> Linted:
    """Load a model once, by the backend that a lint target belongs to; without findings.

    A backend that builds for GPUs of other machines does so for compute capability ``gpu``.
    """
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
        if gpu is not None and any(each.name == "for" for each in backend.options.options):
            options = replace(options, extra={f"{owner}.for": "SM{}{}".format(*gpu), **options.extra})
            try:
                backend.options.read(options.extra)
            except ConfigError:
                return Linted(missing="{} does not build for compute capability {}.{}".format(runtime, *gpu))
        if feed is None:
            with suppress(ModelError):  # not every dimension has a size
                feed = CaseData(model, Inputs()).sample
        if feed and not options.profiles:
            fixed = {name: InputShape.of(value.shape) for name, value in feed.items()}
            options = replace(options, profiles=(ShapeProfile(shapes=fixed),))
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


def _refusal(
    model: Model, backend: Backend, options: BuildOptions, feed: Mapping[str, Array] | None
) -> Finding | None:
    """The refusal of the runtime, or values far from ONNX's definition; of runs that succeed without optimizations."""
    plain = hooks.declaration_of(backend.name).as_defined
    with TemporaryFolder() as folder:
        path = model.path or folder / "model.onnx"
        if model.path is None:
            save_model(model.proto, path)
        error, finding = _tried(backend, path, options, None), LOAD
        if error is None and (not plain or feed is None):
            return None
        if error is None:
            error, finding = _tried(backend, path, options, feed), RUN
        if error is not None:
            unoptimized = replace(options, extra={**options.extra, **plain})
            by_optimizer = bool(plain) and _tried(backend, path, unoptimized, feed) is None
            if finding is RUN and not by_optimizer:
                return None
            cure = RUN.cure if by_optimizer else error.cure or finding.cure
            words = " ".join(error.what.replace(str(path), "the model").split())
            return replace(finding, node=named_node(model, words), message=words, cure=cure)
        assert feed is not None
        found = compared_with_definition(Model(model.proto, path=path), [feed], backend, options)
    if found is None or found.sqnr_db >= DEFAULT_MIN_SQNR_DB:
        return None
    first = f", first at {found.node}" if found.node else ""
    words = f"{found.sqnr_db:.1f} dB against its definition at output '{found.output}'{first}"
    return replace(VALUES, node=named_node(model, found.node), message=words)


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


def build_for(prepared: Prepared, tuned: Path, request: BuildRequest) -> BuildEvidence:
    """Build a model in a process of its own, and count the kernels of its heavy operators, all and those in 8 bits."""
    blank = BuildEvidence(backend=request.backend, target=request.target)
    target = {f"{request.backend}.for": request.target} if request.target else {}
    options = replace(prepared.options, extra={**prepared.options.extra, **target}, state=None)
    with ExitStack() as opened:
        own = not request.backend
        backend = prepared.backend if own else opened.enter_context(closing(Isolated(request.backend)))
        backend.options.read(options.extra)
        found = backend.probe(options)
        if not found.usable:
            return replace(blank, missing=found.why, cure=found.install)
        prepared.resources.report_step(f"building with {request.key or backend.name}")
        try:
            with closing(backend.build(tuned, options)) as engine:
                engine.bind(prepared.loads[0].feeds)
                layers = engine.layers(1)
        except BackendError as error:
            return replace(blank, refused=error.what, cure=error.cure or "")
    ops = {node.name: node.op_type for node in load_model(tuned).nodes}
    # a node belongs to the first kernel that computes it in integers, else to its first one
    owners: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for node in (name for name in layer.nodes if ops.get(name) in HEAVY):
            if node not in owners or (layer.integer and not layers[owners[node]].integer):
                owners[node] = index
    kernels = set(owners.values())
    narrow = sum(layers[index].integer for index in kernels)
    return replace(blank, kernels=len(layers), narrow=narrow, heavy=len(kernels), layers=layers, ops=ops)


def file_sizes(given: Model, tuned: Path) -> dict[str, int]:
    """Bytes of the files of the given and the tuned model."""
    data = tuned.with_name(f"{tuned.name}.data")
    files = {
        "reference": [require_path(given), *given.external_files()],
        "tuned": [tuned, data] if data.is_file() else [tuned],
    }
    return {role: sum(file.stat().st_size for file in own) for role, own in files.items()}


_MOVING = MOVING_OPS | SHAPE_SOURCES


def quantized_work(
    pairs: Iterable[PlacedPair], ops: Mapping[str, str], layers: Sequence[LayerTime]
) -> QuantizedWork:
    """The nodes that kernels compute in narrow formats; without kernels, heavy nodes (by ``ops``) that read pairs."""
    runs = any(not layer.boundary for layer in layers)
    if runs:
        computed = {node for layer in layers if layer.integer and not layer.boundary for node in layer.nodes}
        nodes = {name for name in computed if ops.get(name) not in _MOVING}
    else:
        readers = {end.node for pair in pairs for end in pair.site.consumers}
        nodes = {name for name in readers if ops.get(name) in HEAVY}
    return QuantizedWork(nodes=tuple(sorted(nodes)), runs=runs)


def rejected_candidates(
    confirmed: Confirmed, limits: Limits, ops: Mapping[str, str]
) -> tuple[RejectedCandidate, ...]:
    """The candidates of a search and its confirmation that show why the reference was selected, by their last time.

    Empty if another model was selected.
    """
    if not confirmed.choice.unchanged:
        return ()
    plain = confirmed.latency.ratios.get(
        FLOAT32
    )  # the model to which the ratios of trials refer, if it is converted
    scale = 1.0 if plain is None else plain.median
    # the profile of a converted model is not that of the reference
    reference = confirmed.trials[0].layers if plain is None else ()
    found, timed, roles = dict[str, Trial](), dict[str, Interval](), dict[str, list[str]]()  # by digest
    for trial in confirmed.trials:
        if trial.is_candidate and trial.ratio is not None:
            digest, ratio = trial.placement.digest, scale * trial.ratio
            found.setdefault(digest, trial)
            timed.setdefault(digest, Interval(median=ratio, low=ratio, high=ratio))
    for role, line in confirmed.lines:
        if role in confirmed.ratios and line.placement.sites:
            digest = line.placement.digest
            found.setdefault(digest, line)
            timed[digest] = confirmed.ratios[role]
            roles.setdefault(digest, []).append(role)
    sqnr_db = {digest: limits.figures(trial.placement).sqnr_db for digest, trial in found.items()}
    known = sorted(found, key=lambda digest: timed[digest].median)
    within = [digest for digest in known if limits.admits(found[digest].placement)]
    beyond = [digest for digest in known if digest not in within and timed[digest].median < 1]
    beyond.sort(key=lambda digest: sqnr_db[digest] or -math.inf, reverse=True)
    groups = {
        "fastest candidate": known,
        "fastest candidate within the limits": [] if within[:1] == known[:1] else within,
        "most accurate faster candidate": [] if beyond[:1] == known[:1] else beyond,
        "everything quantized": [digest for digest in known if "everything" in roles.get(digest, ())],
        "placement of the given model": [digest for digest in known if found[digest].placement.given],
    }
    named: dict[str, list[str]] = {}
    for name, group in groups.items():
        for digest in group[:1]:
            named.setdefault(digest, []).append(name)
    return tuple(
        RejectedCandidate(
            role=first if not others else f"{first} ({', '.join(others)})",
            placement=digest,
            pairs=found[digest].placement.pairs,
            ratio=timed[digest],
            is_confirmed=digest in roles,
            sqnr_db=sqnr_db[digest],
            accuracy=found[digest].accuracy,
            reason=limits.missed_text(found[digest].placement)
            if digest not in within
            else (SLOWER if timed[digest].median >= 1 else UNPROVED),
            kernels=_compared(found[digest], reference, ops),
        )
        for digest, (first, *others) in named.items()
    )


def _compared(
    trial: Trial, reference: tuple[LayerTime, ...], ops: Mapping[str, str]
) -> KernelComparison | None:
    """The kernels of a candidate beside the reference's; ``None`` without times of both."""
    tuned = engine_of("candidate", trial.placement, trial.layers, ops)
    before = ExplainedEngine(name="reference", layers=reference, ops=ops)
    if not trial.layers or not before.timed or not tuned.timed:
        return None
    rows = EngineComparison(before, tuned).rows
    slower = [row for row in rows if row.kind == "kernel" and row.difference_ms > 0]
    faster = [row for row in rows if row.kind == "kernel" and row.difference_ms < 0]
    left = (op_of(layer.nodes[0], ops) for layer in tuned.left_in_float if layer.nodes)
    return KernelComparison(
        kernels=len(tuned.kernels),
        integer=len(tuned.integer_kernels),
        unfused=len(tuned.unfused_pairs),
        left_in_float=dict(Counter(op for op in left if op not in _MOVING)),
        reference_ms=before.sum_ms,
        tuned_ms=tuned.sum_ms,
        conversions_ms=math.fsum(row.difference_ms for row in rows if row.kind == "conversion"),
        slower_ms=math.fsum(row.difference_ms for row in slower),
        faster_ms=math.fsum(row.difference_ms for row in faster),
        slower=_places(slower),
        faster=_places(faster),
    )


def engine_of(
    name: str, placement: Placement, layers: tuple[LayerTime, ...], ops: Mapping[str, str]
) -> ExplainedEngine:
    """The profile of a placement, with the nodes that read its activation pairs."""
    sites = (site for site in placement.sites if not site.weight)
    quantized = frozenset(end.node for site in sites for end in site.consumers)
    return ExplainedEngine(name=name, layers=layers, ops=ops, quantized=quantized)


def _places(rows: Sequence[Row], most: int = 3) -> tuple[PlaceChange, ...]:
    return tuple(
        PlaceChange(place=short_place(row.text, 60), reference_ms=row.reference_ms, tuned_ms=row.tuned_ms)
        for row in rows[:most]
    )
