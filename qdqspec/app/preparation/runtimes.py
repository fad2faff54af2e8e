"""The runtimes of a case: the backend with its options and lock, and runs beside those that are timed.

Such runs return inner tensors of a model, its outputs as ONNX defines them, or the kernels that the backend fuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import onnx

from qdqspec._core import hooks
from qdqspec._core.arrays import Array, Feed, Reduction
from qdqspec._core.config import Settings
from qdqspec._core.files import TemporaryFolder
from qdqspec._core.locks import DeviceLock, log_wait
from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec._core.units import count_text
from qdqspec.accuracy import Runtime, sqnr_of_runs
from qdqspec.backends import Backend, BuildOptions, Engine, Isolated, backend_named, engines_at_once
from qdqspec.errors import BackendError, BackendUnavailableError, ModelError, QdqspecError, StateError
from qdqspec.graph import Model, as_defined, load_model, require_path, save_model, with_outputs
from qdqspec.graph.ops import has_floats
from qdqspec.graph.regions import groups_of
from qdqspec.graph.trt import is_pair_op
from qdqspec.types import DEFAULT_MIN_SQNR_DB, DEFINED_DB, DefinitionEvidence, DeviceKey, Progress

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared


def log_progress(progress: Progress) -> None:
    """Log a wait, since no progress display shows it."""
    if progress.waiting:
        log_wait(f"{progress.case}: {progress.waiting}")


@dataclass(kw_only=True)
class Resources:
    """The shared resources of a search, in which progress is reported under the name of its case."""

    backend: Backend
    options: BuildOptions
    settings: Settings
    watch: Callable[[Progress], None] = log_progress
    case: str = ""
    lock: str = ""  # the name of the device's lock; none if it is empty
    waits: list[float] = field(default_factory=list)  # seconds of each wait for other runs on the device
    seconds_left: Callable[[], float | None] = lambda: None  # of the run's time limit

    @property
    def device(self) -> DeviceKey:
        """The device that the backend runs on."""
        return self.backend.device(self.options)

    @property
    def jobs(self) -> int:
        """The number of parallel builds: 1 if the backend times kernels while building, whatever was requested."""
        return self.settings.jobs if self.backend.capabilities(self.options).builds_side_by_side else 1

    def exclusive(self) -> AbstractContextManager[object]:
        """The lock of the device, for a measurement."""
        if not self.lock:
            return nullcontext()
        return DeviceLock(self.lock, report=self.report_wait, waited=self.waits.append)

    def report_step(self, text: str, seconds_left: float | None = None) -> None:
        """Report the beginning of a step outside a search, with the seconds that are left for it."""
        step = Progress(case=self.case, phase="", done=0, total=0, doing=text, seconds_left=seconds_left)
        self.watch(step)

    def report_wait(self, text: str) -> None:
        """Report that this run waits for another one."""
        self.watch(Progress(case=self.case, phase="waiting", done=0, total=0, waiting=text))


def resources_of(settings: Settings, device_key: Callable[[DeviceKey], str] | None = None) -> Resources:
    """The resources of the backend that ``settings`` name, with each engine in a process of its own."""
    backend = Isolated(settings.backend, device_key=device_key)
    return Resources(backend=backend, options=BuildOptions.of(settings), settings=settings)


def lock_of(resources: Resources) -> str:
    """The name of the lock on the hardware, which other backends on the same hardware take too."""
    own = backend_named(resources.settings.backend)  # without a changed key: the hardware is the same
    hardware = own.capabilities(resources.options).hardware
    if hardware == "cpu":
        return hardware
    return f"{resources.settings.device}-{hardware or own.device(resources.options).key}"


ARITHMETIC = DEFAULT_BACKEND  # the backend that computes a model as ONNX defines it
_REFERENCE = "fake"  # computes, slowly, what `ARITHMETIC` lacks: operators of domain trt, for NVFP4 and MXFP8
SAMPLES = 4  # of the data, on which the given model is compared with its definition


def unfused(options: BuildOptions) -> BuildOptions:
    """Options for a build by `ARITHMETIC` that computes every pair and fuses nothing."""
    return replace(options, extra={**options.extra, **hooks.default().as_defined}, hashed=False)


def runner(backend: Backend, options: BuildOptions) -> Callable[[Path], Engine]:
    """Builds models to compare outputs: on the backend, or, while the function lives, as ONNX defines them."""
    if backend.capabilities(options).runs:
        return partial(backend.build, options=options)
    arithmetic, slow = Isolated(ARITHMETIC), Isolated(_REFERENCE)

    def build(path: Path) -> Engine:
        return (slow if has_foreign_pairs(path) else arithmetic).build(path, unfused(options))

    return build


def has_foreign_pairs(path: Path) -> bool:
    """Whether a model has pairs of TensorRT's domain, which `ARITHMETIC` lacks."""
    return any(is_pair_op(node.proto) for node in load_model(path).nodes)


def reference_runtime(opened: ExitStack, options: BuildOptions, backend: Backend | None = None) -> Runtime:
    """The runtime `ARITHMETIC`, with each engine in a process of its own until ``opened`` is closed.

    Several engines run at once (`engines_at_once`). ``backend`` is used if it is that runtime already.
    """
    if backend is None or backend.name != ARITHMETIC:
        backend = opened.enter_context(Isolated(ARITHMETIC))
    fast = replace(options, extra={**options.extra, **hooks.default().optimized}, hashed=False)
    return Runtime(
        exact=partial(backend.build, options=unfused(options)),
        fast=partial(backend.build, options=fast),
        processes=engines_at_once(options.threads),
    )


_RANDOM = "random inputs may not suit this model: give it real ones (inputs.calibration, or --calibration)"
_CURE = (
    "give the library of its operators with --qdq-plugin (--plugin on the command line), or a scale for each "
    "activation in a calibration cache: inputs.scales"
)


@dataclass(frozen=True, slots=True)
class Observer:
    """An engine of a model with inner tensors as outputs. Its errors are reported for the model that it observes."""

    engine: Engine
    path: Path
    given: Model
    cure: str | None = None  # the advice for a failed run

    def __call__(self, feed: Feed) -> Mapping[str, Array]:
        """The outputs by name."""
        with reported_for(self.given, self.path, self.cure):
            return self.engine.run(feed)

    def reduced(self, feed: Feed, how: Reduction) -> Mapping[str, Array]:
        """The outputs by name, reduced in the process of the engine if it has one of its own."""
        own = getattr(self.engine, "reduced", None)
        with reported_for(self.given, self.path, self.cure):
            return self.engine.run(feed) if own is None else own(feed, how)


def open_observer(prepared: Prepared, opened: ExitStack, proto: onnx.ModelProto) -> Observer:
    """Build ``proto``, an observer of the model of a case, which runs until ``opened`` is closed.

    It runs on the backend itself if that returns outputs fast enough; else on the reference runtime, with the backend
    as fallback for models that this cannot run, such as those with plugins. Raises `BackendError` if neither builds it.
    """
    given, backend, options = prepared.given, prepared.backend, replace(prepared.options, hashed=False)
    cure = _RANDOM if prepared.data.calibration is None else None
    path = opened.enter_context(TemporaryFolder()) / "observer.onnx"
    save_model(proto, path, base=require_path(given).parent)

    def build(runtime: Backend) -> Observer:
        with reported_for(given, path):
            engine = opened.enter_context(closing(runtime.build(path, options)))
        return Observer(engine, path, given, cure)

    if backend.capabilities(options).observes:
        return build(backend)
    try:
        return build(opened.enter_context(Isolated(ARITHMETIC)))
    except BackendError as error:
        refusal = error.what
    try:  # although each additional output costs memory and prevents fusion
        observer = build(backend)
    except BackendError as error:
        raise BackendError(
            f"no range can be found for its activations: {ARITHMETIC} cannot run it ({refusal}), nor can "
            f"{backend.name} with activations for outputs ({error.what})",
            where=given.where,
            cure=_CURE,
        ) from None
    if not backend.capabilities(options).runs:
        raise BackendError(
            f"no values can be computed: {ARITHMETIC} cannot run it ({refusal}), and {backend.name} runs nothing on "
            "this machine",
            where=given.where,
            cure="convert the model to float32 or float16, or give the library of its operators with --qdq-plugin "
            "(--plugin on the command line)",
        )
    prepared.note_once(
        f"calibrated on {backend.name} itself, since {ARITHMETIC} cannot run the model: {refusal}"
    )
    return observer


@contextmanager
def reported_for(given: Model, path: Path, cure: str | None = None) -> Iterator[None]:
    """Errors of a file that is made of a model, such as an observer, name the model."""
    try:
        yield
    except BackendUnavailableError:
        raise
    except BackendError as error:
        what = error.what.replace(str(path), given.where)
        raise BackendError(what, where=given.where, cure=error.cure or cure) from None


# ---- the definition of a model ------------------------------------------------------------------


class Definition:
    """A model as ONNX defines it: integer operators in float, built by `ARITHMETIC` without optimization."""

    def __init__(self, model: Model, backend: Backend, options: BuildOptions) -> None:
        self.model = model
        self.runtime: Backend = backend if backend.name == ARITHMETIC else Isolated(ARITHMETIC)
        self._options = unfused(options)
        self._folder = TemporaryFolder()
        proto, own = as_defined(model), require_path(model)
        self.path = own  # of the model itself if it has no integer operators
        if proto is not model.proto:
            self.path = self._folder.path / own.name
            save_model(proto, self.path, base=own.parent)

    def build(self, path: Path | None = None) -> Engine:
        """An engine of it, or of another file. Raises `BackendError` if the runtime lacks one of its operators."""
        return self.runtime.build(path or self.path, self._options)


def compared_with_definition(
    model: Model, feeds: Iterable[Feed], backend: Backend, options: BuildOptions, samples: int = SAMPLES
) -> DefinitionEvidence | None:
    """Compare the model as the backend runs it with its definition, on the first ``samples``: more find rarer errors.

    ``None`` where they cannot be compared: one of them does not run, or no output is a float tensor, or it is random.
    """
    if not backend.capabilities(options).runs or model.random_nodes:
        return None
    inputs = list(islice(feeds, samples))
    definition = Definition(model, backend, options)
    try:
        expected = _outputs(definition.build, inputs)
        seen = _outputs(lambda: backend.build(require_path(model), options), inputs)
    except BackendError:  # the caller reports a model that does not run
        return None
    by_output = {
        name: sqnr_of_runs([outputs[name] for outputs in expected], [outputs.get(name) for outputs in seen])
        for name, value in (expected[0].items() if expected else ())
        if np.issubdtype(value.dtype, np.floating)
    }
    if not by_output:
        return None
    output = min(by_output, key=by_output.__getitem__)
    found = DefinitionEvidence(sqnr_db=by_output[output], output=output, samples=len(inputs))
    return found if found.holds else replace(found, node=_likely_node(definition, backend, inputs[0]))


def definition_warning(found: DefinitionEvidence, backend: str, data: str, *, is_quantized: bool) -> str:
    """The warning of a model that the backend computes otherwise than ONNX defines it."""
    cure = "reduce the runtime's optimizations (--qdq-backend-option), or report it to the authors of the runtime"
    if is_quantized:
        cure = "tune it on this processor, from its float form (qdqspec tune)"
    advice = f"Do not rely on its outputs here: {cure}"
    if is_quantized and found.sqnr_db >= DEFAULT_MIN_SQNR_DB:
        advice = "Values that are rounded to another step can cause a difference of this size"
    return (
        f"{difference_text(found, backend, 'the given model', data)}. All outputs are compared with the definition, "
        f"which {ARITHMETIC} computes without optimization. {advice}"
    )


def difference_text(found: DefinitionEvidence, backend: str, model: str, data: str) -> str:
    """The difference of a model's run from its definition, in words."""
    node = f", first at {found.node}" if found.node else ""
    return (
        f"{backend} does not compute {model} as ONNX defines it: {found.sqnr_db:.1f} dB at output '{found.output}' on "
        f"{count_text(found.samples, 'sample')} of {data} data{node}"
    )


def _outputs(build: Callable[[], Engine], samples: Sequence[Feed]) -> list[Mapping[str, Array]]:
    with closing(build()) as engine:
        return [engine.run(feed) for feed in samples]


def _likely_node(definition: Definition, backend: Backend, feed: Feed) -> str:
    """The first node whose output differs; empty for a runtime whose graph cannot be written.

    The graph that the runtime makes of the model is run node by node, and compared where it has tensors of the model.
    """
    model = definition.model
    write = hooks.declaration_of(backend.name).optimizers.get(f"{backend.name}-all")
    if write is None:
        return ""
    try:
        with TemporaryFolder() as folder:
            optimized: Path = hooks.load(write)(require_path(model), folder)
            graph = onnx.load(str(optimized), load_external_data=False).graph
            names = [name for node in graph.node for name in node.output if name in model.producer]
            values = list[Mapping[str, Array]]()
            for source in (definition.path, optimized):
                given = Model(onnx.load(str(source), load_external_data=False), path=source)
                observer, path = with_outputs(given, names), folder / f"observer-{len(values)}.onnx"
                save_model(observer.proto, path, base=source.parent)
                with closing(definition.build(path)) as engine:
                    values.append(observer.seen(engine.run(feed)))
    except QdqspecError:
        return ""
    expected, seen = values
    for name in names:
        is_same_shape = name in expected and name in seen and expected[name].shape == seen[name].shape
        if is_same_shape and sqnr_of_runs([expected[name]], [seen[name]]) < DEFINED_DB:
            node = model.producer[name]
            return f"{node.op_type} '{node.name}'"
    return ""


Groups: TypeAlias = tuple[tuple[str, ...], ...]


def fused_groups(prepared: Prepared) -> Groups:
    """The nodes of each kernel of the float model, from a file or a build; none if the backend reports no kernels.

    It is a build of the model in float16 if kernels of pairs fuse like those of float16.
    """
    model, backend, options = prepared.given, prepared.backend, prepared.options
    if (file := prepared.case.regions.graph) is not None:
        return groups_of_file(file, model)

    def groups(path: Path, feed: Feed) -> Groups:
        with closing(backend.build(path, options)) as engine:
            engine.bind(feed)
            return groups_of(engine.layers())

    found, feed = None, prepared.data.sample
    if prepared.capabilities.fuses_in_half and has_floats(model):
        halves = {name: v.astype(np.float16) if v.dtype == np.float32 else v for name, v in feed.items()}
        try:
            with TemporaryFolder() as folder:
                found = groups(write_half(model, folder / "half.onnx", backend.name), halves)
        except (ModelError, BackendError) as error:
            prepared.note_once(
                f"fusions were read from a build of the given model, not of its float16 form: {error.what}"
            )
    found = groups(require_path(model), feed) if found is None else found
    if not found:
        prepared.note_once(f"{backend.name} reports no kernels: regions follow structure instead")
    return found


def groups_of_file(path: Path, model: Model) -> Groups:
    """The nodes of each kernel in a file of a runtime's tool; raises `StateError` if it has none of the model."""
    refusal, advice = None, ""
    for read in hooks.readers("exported"):
        try:
            found = read([path], model)
        except BackendError as error:
            refusal = refusal or error
            continue
        advice = advice or found.advice
        groups = groups_of(found.layers)
        if known := tuple(group for group in groups if not model.by_name.keys().isdisjoint(group)):
            return known
    if refusal is not None and not advice:
        raise StateError(refusal.what, where=path, cure=refusal.cure)
    raise StateError(f"no layer in it names a node of {model.where}", where=path, cure=advice or None)


def write_half(model: Model, path: Path, backend: str, *, keep_io: bool = False) -> Path:
    """Write a model in float16, by a hook of the backend; raises `ModelError` if it cannot be converted."""
    convert = hooks.load(hooks.declaration_of(backend).float16 or hooks.default().float16)
    proto = convert(model, require_path(model), keep_io=keep_io)
    onnx.save(proto, path, save_as_external_data=True, location=f"{path.name}.data")
    return path
