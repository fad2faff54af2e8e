"""Times model files of any tool against each other: of one case, or of cases that differ in the runtime only.

Times of separate runs cannot be compared: the speed of the machine changes between them. So all models are built anew
and timed in one run, each on its own runtime, and compared by ratios to one reference: the fastest float model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from qdqspec._core.arrays import Feed
from qdqspec._core.files import TemporaryFolder
from qdqspec.accuracy import CaseData
from qdqspec.app.evidence.explained import ExplainedEngine
from qdqspec.app.preparation.files import half_reference, plain_file
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import SAMPLES, Resources, compared_with_definition
from qdqspec.app.preparation.stored import FLOAT32_FILE
from qdqspec.backends import Backend, BuildOptions, Engine
from qdqspec.errors import BackendError
from qdqspec.graph import load_model, require_path
from qdqspec.timing import (
    CONFIRM_BUILDS,
    CONFIRM_ROUNDS,
    Bench,
    FreshBuilds,
    Load,
    Together,
    attach,
    settle,
)
from qdqspec.types import (
    FLOAT32,
    NO_PAIRS,
    Clock,
    DefinitionEvidence,
    Inputs,
    InputShape,
    LatencyEvidence,
    Placement,
    Progress,
    RuntimeComparison,
    RuntimeModel,
    Samples,
    ShapeProfile,
    TuneRules,
)

Measure: TypeAlias = Callable[[int, int], LatencyEvidence]  # by numbers of builds and rounds


def clock_for(rules: TuneRules, threads: int) -> Clock:
    """The clock that decides races: thread CPU time for one thread, else wall time."""
    return rules.clock if rules.clock != "auto" else "cpu" if threads == 1 else "wall"


def time_files(
    resources: Resources,
    files: Mapping[str, Path],
    loads: tuple[Load, ...],
    rules: TuneRules,
    *,
    builds: int = CONFIRM_BUILDS,
    rounds: int = CONFIRM_ROUNDS,
) -> LatencyEvidence:
    """Time files by role (including ``reference`` and ``tuned``), interleaved, from fresh builds.

    Raises `BackendError` if the reference does not run; another role that fails is omitted, with its reason.
    """
    bench = Bench(
        resources.backend,
        None,
        loads,
        clock=clock_for(rules, resources.settings.threads),
        random=np.random.default_rng(resources.settings.seed),
        options=resources.options,
        exclusive=resources.exclusive,
        jobs=resources.jobs,
        report=resources.report_step,
    )
    return bench.compare(files, builds=builds, rounds=rounds)


def time_tuned(
    prepared: Prepared, tuned: Path, builds: int = CONFIRM_BUILDS, rounds: int = CONFIRM_ROUNDS
) -> LatencyEvidence:
    """Time the given model and another with the same inputs, and the given one in other float types as in a search."""
    files = {"reference": require_path(prepared.given), "tuned": tuned}
    loads, rules = prepared.loads, prepared.case.tune
    with TemporaryFolder() as folder:
        files |= half_reference(prepared, folder)
        if prepared.converted_from:
            files[FLOAT32] = plain_file(prepared, folder)
        measured = time_files(prepared.resources, files, loads, rules, builds=builds, rounds=rounds)
    note_float_types(prepared, measured)
    return measured


def latency_warnings(measured: LatencyEvidence, drift: float = 0.05) -> Iterator[str]:
    """Warnings of a measurement of reference and tuned model.

    ``drift`` is the relative change of the processor's speed from which it is reported.
    """
    if abs(measured.drift) > drift:
        changed = f"CPU speed changed by {measured.drift:+.0%} during measurement"
        yield f"{changed}: trust the ratio, not the milliseconds"
    roles: dict[str, list[str]] = {}
    samples = {role: measured.samples[role] for role in ("reference", "tuned") if role in measured.samples}
    for role, taken in samples.items():
        for note in taken.notes:
            roles.setdefault(note, []).append(role)
    if len({taken.launched_singly for taken in samples.values()}) > 1:
        mixed = "compared with one engine as a CUDA graph and the other without"
        roles[f"{mixed}: the ratio holds the time of launches"] = list(samples)
    yield from (f"latency of {' and '.join(names)}: {note}" for note, names in roles.items())


def note_float_types(prepared: Prepared, latency: LatencyEvidence) -> None:
    """Add a warning if the model in another float type did not run, or is significantly faster than the tuned model."""
    if why := latency.failures.get("float16"):
        prepared.note_once(f"the float16 reference did not run: {why}")
    tuned = latency.tested.get("tuned")
    faster = {
        role: f"{latency.tested[role].mean.median:.2f} of the reference's time"
        for role in ("float16", FLOAT32)
        if tuned and role in latency.tested and latency.tested[role].enclosing.high < tuned.enclosing.low
    }
    if tuned and "float16" in faster:
        prepared.note_once(
            f"the model in float16 is faster than the tuned one: {faster['float16']}, and the tuned one "
            f"{tuned.mean.median:.2f}; convert it to float16 first, and tune that"
        )
    if FLOAT32 in faster:
        prepared.note_once(
            f"converted to float32, the model is faster without any pair: {faster[FLOAT32]}; that is a gain of the "
            f"type alone, and not selected. The model is {FLOAT32_FILE} among the results"
        )


def profile_models(
    models: Mapping[str, Path],
    backend: Backend,
    options: BuildOptions,
    inputs: Inputs,
    *,
    clock: Clock,
    seed: int = 0,
    rounds: int = 12,
) -> dict[str, tuple[ExplainedEngine, DefinitionEvidence | None]]:
    """Profile models on the same inputs: the first sample of the data of ``inputs``, or random ones from the seed.

    Also the difference of their outputs from their definitions in ONNX. Without a clock the kernels have no times. More
    ``rounds`` give narrower times, and take a turn of each model each. Raises `BackendError` if a model does not build.
    """
    random, has_clock = np.random.default_rng(seed), backend.capabilities(options).has_clock
    definitions, engines = dict[str, DefinitionEvidence | None](), dict[str, Engine]()
    with ExitStack() as opened:
        for name, path in models.items():
            model = load_model(path)
            data = CaseData(model, inputs, seed=seed).shaped()
            source = inputs.calibration or inputs.evaluation
            feeds: Iterable[Feed] = list(data.random(SAMPLES)) if source is None else data.open(source)
            timed = data.first_fitting(feeds.__iter__)
            definitions[name] = compared_with_definition(model, feeds, backend, options)
            shapes = {own: InputShape.of(value.shape) for own, value in timed.items()}
            fitting = replace(options, profiles=(ShapeProfile(shapes=shapes),))
            engines[name] = opened.enter_context(closing(backend.build(path, fitting)))
            engines[name].bind(timed)
        samples = dict.fromkeys(engines, Samples())
        if has_clock:
            turns = {name: settle(engine, clock) for name, engine in engines.items()}
            names = list(engines)
            for position in np.concatenate([random.permutation(len(names)) for _ in range(rounds)]):
                name = names[position]
                samples[name] += turns[name].sample(engines[name])
        return {
            name: (
                ExplainedEngine(
                    name=name,
                    layers=engine.layers() if has_clock else engine.layers(1),
                    end_to_end_ms=samples[name].median_ms(clock) if has_clock else None,
                    notes=samples[name].notes,
                ),
                definitions[name],
            )
            for name, engine in engines.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedFile:
    """A model file on a runtime, with the inputs of a case."""

    prepared: Prepared
    path: Path
    backend: Backend
    options: BuildOptions

    @classmethod
    def of(cls, prepared: Prepared, path: Path | None = None) -> TimedFile:
        """A model of a case, by default the given one, on the runtime of the case."""
        path = path or require_path(prepared.given)
        return cls(prepared=prepared, path=path, backend=prepared.backend, options=prepared.options)

    def open(self) -> Engine:
        """A fresh build with its inputs bound."""
        built = self.backend.build(self.path, replace(self.options, fresh=True, hashed=False))
        return attach(built, self.prepared.loads)


def time_across(files: Mapping[str, TimedFile]) -> tuple[Together, Clock]:
    """Time files on their runtimes, each from `CONFIRM_BUILDS` fresh builds, one turn of each in every round.

    Also the clock that compares them: CPU time if all cases are measured by it and all builds have it.
    """
    cases = [file.prepared for file in files.values()]
    clocks = {clock_for(prepared.case.tune, prepared.settings.threads) for prepared in cases}
    clock: Clock = "cpu" if clocks == {"cpu"} else "wall"

    @contextmanager
    def all_locked() -> Iterator[None]:
        """Lock the hardware of all cases, in one order, so that two runs cannot wait for each other."""
        with ExitStack() as stack:
            locks = {prepared.resources.lock: prepared.resources.exclusive for prepared in cases}
            for _, exclusive in sorted(locks.items()):
                stack.enter_context(exclusive())
            yield

    random = np.random.default_rng(cases[0].settings.seed)
    fresh = FreshBuilds(clock=clock, random=random, exclusive=all_locked)
    openers = {name: [file.open] * CONFIRM_BUILDS for name, file in files.items()}
    timed = fresh.time(openers, CONFIRM_ROUNDS, close_others=lambda: None)
    return timed, timed.clock(clock)


Models: TypeAlias = dict[str, tuple[RuntimeModel, TimedFile]]  # by label


def models_of(
    prepared: Prepared,
    tuned: Path | None = None,
    placement: Placement = NO_PAIRS,
    sqnr_db: float | None = None,
) -> Models:
    """The float model of a case on its runtime and, unless that was selected, the tuned one; without times."""
    name, backend = prepared.case.name, prepared.backend
    blank = RuntimeModel(case=name, backend=backend.name, target=backend.target, model="float")
    models = {blank.label: (blank, TimedFile.of(prepared))}
    if tuned is not None:
        least = prepared.case.tune.limits.min_sqnr_db
        own = replace(
            blank,
            model="tuned",
            scheme=placement.digest,
            pairs=placement.pairs,
            sqnr_db=sqnr_db,
            limit_db=least if least is not None and sqnr_db is not None and sqnr_db < least else None,
        )
        models[own.label] = own, TimedFile.of(prepared, tuned)
    return models


def compare_runtimes(
    name: str, cases: Iterable[Models], watch: Callable[[Progress], None]
) -> RuntimeComparison:
    """Time the float models of all runtimes and their tuned models, and find the fastest that is accurate enough.

    A model that does not run any more is listed with the reason. Raises `BackendError` if no float model runs.
    """
    watch(Progress(case=name, phase="", done=0, total=0, doing="comparing runtimes"))
    started = time.monotonic()
    models = {label: each for own in cases for label, each in own.items()}
    timed, clock = time_across({label: file for label, (_, file) in models.items()})
    ran = {label: model for label, (model, _) in models.items() if label in timed.samples}
    floats = [label for label, model in ran.items() if model.model == "float"]
    if not floats:
        errors = "; ".join(map(str, timed.failures.values()))
        raise BackendError(f"no float model could be built and run again: {errors}", where=name)
    first = timed.ratios(floats[0], clock)
    reference = min(floats, key=lambda label: first[label].median)
    accurate = [label for label, model in ran.items() if model.limit_db is None]
    winner = min(accurate, key=lambda label: first[label].median)
    ratios = timed.ratios(reference, clock)
    to_winner = timed.ratios(winner, clock)
    reference_ms = timed.joined(reference).median_ms(clock)

    def measured(label: str, model: RuntimeModel) -> RuntimeModel:
        """The model with its measurement, if it has one. Milliseconds follow from the ratio, as in `LatencyLine`."""
        if label not in ran:
            return replace(model, failure=str(timed.failures.get(label, "")))
        return replace(
            model,
            median_ms=reference_ms * ratios[label].median,
            ratio=ratios[label],
            to_winner=to_winner[label],
            samples=timed.joined(label),
        )

    return RuntimeComparison(
        name=name,
        clock=clock,
        builds=CONFIRM_BUILDS,
        models=tuple(measured(label, model) for label, (model, _) in models.items()),
        reference=reference,
        winner=winner,
        drift=timed.drift(clock),
        seconds=time.monotonic() - started,
    )
