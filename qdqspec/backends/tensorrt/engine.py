"""TensorRT 10.9 to 11.4 through its Python API.

Neither the constructor nor `capabilities` imports TensorRT or initializes CUDA in this process: see
`qdqspec.backends.tensorrt.device`. Options begin with ``tensorrt.``: see `qdqspec.backends.tensorrt.build`.
``docs/tensorrt.md`` lists tested and untested properties.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
import time
from collections import deque
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec._core.arrays import Array
from qdqspec._core.options import BackendOptions
from qdqspec.backends._engine import BoundEngine, require_file
from qdqspec.backends._source import read_source
from qdqspec.backends.base import PLAIN, Availability, BuildOptions, Capabilities, Engine
from qdqspec.backends.tensorrt import cuda
from qdqspec.backends.tensorrt.build import OPTIONS, BuiltEngine, TimingOptions, build_engine
from qdqspec.backends.tensorrt.cache import Shared
from qdqspec.backends.tensorrt.device import TENSORRT, DeviceState, GpuWatch, look, parts
from qdqspec.backends.tensorrt.layers import kernel_list_hash, parse_layers
from qdqspec.backends.tensorrt.log import KERNELS, open_log, refusals
from qdqspec.backends.tensorrt.ops import capabilities
from qdqspec.backends.tensorrt.run import Execution, ports_of
from qdqspec.errors import BackendUnavailableError
from qdqspec.types import NOT_CAPTURED, DeviceKey, LayerTime, Samples

if TYPE_CHECKING:
    import tensorrt as trt

_PROFILE_WARMUP = 5
_CONTEXT_BYTES = 512 << 20  # assumed, of a process that uses CUDA and TensorRT's kernels
_ENQUEUE_BOUND = 0.8  # launch over device time above which trtexec reports an enqueue-bound run
_LAUNCHES = 256  # number of last runs used for that, and the smallest sufficient number
_FEWEST_LAUNCHES = 8
_IDLE_S = 1.0  # seconds without a run after which a GPU has lowered its clocks
_OPAQUE = "{ForeignNode["  # a region that went to Myelin, TensorRT's other compiler, as a whole
# TensorRT numbers regions and kernels anew in every build: __mye123, _myl4_1.
_NUMBERED = re.compile(r"(?<=_my[le])\d+(_\d+)*")


class TensorRt:
    """NVIDIA TensorRT on one GPU; every network strongly typed."""

    name = "tensorrt"
    options: BackendOptions = OPTIONS
    product = TENSORRT

    @property
    def target(self) -> str:
        """``tensorrt-10`` or ``tensorrt-11``, by the installed package; otherwise the name without a version."""
        version = TENSORRT.installed_version()
        return self.name if version is None else f"{self.name}-{parts(version)[0]}"

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """Report whether TensorRT and the selected GPU are available. A separate process determines it, once."""
        found = look(self.product, options.device)
        return Availability(usable=not found.why, why=found.why, install=found.install, facts=found.facts)

    def device(self, options: BuildOptions) -> DeviceKey:
        """GPU product, compute capability, TensorRT major.minor. Raises if it cannot be used."""
        found = look(self.product, options.device)
        if found.why:
            raise BackendUnavailableError(found.why, cure=found.install)
        asked = {word: text for word, text in options.extra.items() if word.startswith(f"{self.name}.")}
        major, minor = parts(found.tensorrt)
        key = f"{self._hardware(found, options)}-{self.name}-{major}.{minor}"
        return DeviceKey(key=key, details={**found.facts, **asked})

    def _hardware(self, found: DeviceState, options: BuildOptions) -> str:  # noqa: ARG002 - engines are for the GPU
        return found.slug

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:
        """The formats of this GPU and version according to TensorRT's documents; only int8 if there is no GPU."""
        found = look(self.product, options.device)
        return capabilities(found.capability, parts(found.tensorrt))

    def build(self, model: Path, options: BuildOptions) -> Engine:
        """Build a model file; raise `BackendError` with TensorRT's reasons on one line.

        This initializes CUDA: the process cannot be forked afterwards.
        """
        self.options.read(options.extra)  # an invalid option is reported before anything is loaded
        self.product.require()
        require_file(model)
        return self._built(model, options)

    def _built(self, model: Path, options: BuildOptions) -> Engine:
        cuda.select(options.device)
        return TensorRtEngine(model, options)


class TensorRtEngine(BoundEngine[BuiltEngine, Execution]):
    """An engine on one GPU. The model file must exist as long as `layers` is used."""

    def __init__(self, model: Path, options: BuildOptions) -> None:
        import tensorrt as trt

        self._log = open_log()
        self._log.clear()
        gpu = cuda.describe(options.device)
        found = DeviceState(tensorrt=trt.__version__, gpu=gpu.name, capability=gpu.capability)
        free = cuda.memory()[0]
        built = self._build(model, options, f"{found.slug}-tensorrt-{trt.__version__}")
        super().__init__(model, built)
        with refusals(self._log, "the engine could not be read", model):
            self._ports = ports_of(built.engine)
            self.graph_hash = graph_hash(self._information(), model)
        self._shared.record({**built.facts, "graph_hash": self.graph_hash})
        self._stream = cuda.Stream()
        self._held = max(free - cuda.memory()[0], built.facts["plan_bytes"])
        self._watch = GpuWatch(cuda.bus_id(options.device))
        # time to launch a run over its time on the device
        self._launches: deque[float] = deque(maxlen=_LAUNCHES)
        self._last_run = -math.inf  # on the clock of `time.perf_counter`
        self._runner: Execution | None = None

    def _build(self, model: Path, options: BuildOptions, key: str) -> BuiltEngine:
        """Build and load the engine; ``key`` names the GPU and the version."""
        words = OPTIONS.of(options.extra)
        self._timing: TimingOptions = words
        self._log.verbose = words.verbose
        self._shared = Shared(options.state, key, fresh=options.fresh, cache=words.timing_cache)
        return build_engine(model, words, options.profiles, self._shared, self._log)

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        if self._runner is None or not self._runner.feed(feeds):
            if self._runner is not None:
                self._runner.close()
            self._runner = None  # until the next one is open
            self._runner = self._open(feeds)
        return self._runner.fetch()

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs that `time` and `layers` use at a profile; they are copied to the GPU once.

        With several optimization profiles the run uses the kernels of that one, even if another accepts these shapes.
        It is captured as a CUDA graph if that is possible, with a second attempt; if not, ``builds.jsonl`` and
        a note on the samples state the reason: times may then include the host's launch time.
        """
        free = cuda.memory()[0]
        bound = self._open(feeds, profile)
        self._held += max(0, free - cuda.memory()[0])
        if (old := self._bound.pop(profile, None)) is not None:
            old.close()
        self._bound[profile] = bound
        if self._timing.cuda_graph:
            why = bound.capture()
            bound.note = why and f"{NOT_CAPTURED}: {why}"
        else:
            bound.settle()
            why = "switched off by tensorrt.cuda-graph"
        done = {"cuda_graph": bound.graph is not None, "why_not": why}
        self._shared.record({"model": self.model.name, "profile": profile, **done})

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        """Time single runs between two events on the GPU, in milliseconds: compute only, without copies.

        They are returned as wall times; there is no CPU time.
        """
        bound, stream = self._require_bound(profile), self._stream
        idle = time.perf_counter() - self._last_run > _IDLE_S  # turns of a race are short: no warm-up by time
        with refusals(self._log, "the model could not be timed", self.model):
            cuda.warm_up(stream, bound.launch, warmup, self._timing.warmup_ms if idle else 0.0)
            timed = cuda.time_runs(stream, bound.launch, runs)
        self._last_run = time.perf_counter()
        self._launches.extend(h / max(d, 1e-6) for h, d in zip(timed.host_ms, timed.device_ms, strict=True))
        self._watch.observe()
        notes = [*self._require_open().notes, bound.note, *self._watch.notes]
        is_known = len(self._launches) >= _FEWEST_LAUNCHES
        if is_known and statistics.median(self._launches) > _ENQUEUE_BOUND:
            # Without the share, so that the notes of several measurements are one.
            notes.append("enqueue-bound: the host takes as long to launch a run as the GPU to compute it")
        return Samples(wall_ms=timed.device_ms, notes=tuple(filter(None, notes)))

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per layer, in names of the model without Q/DQ, from a profiling context.

        Their sum exceeds the latency by 18 to 35 % in recorded runs: it shows relative, not absolute times.
        """
        with closing(self._open(self._require_bound(profile).feeds, profile)) as session:
            times = session.profile(_PROFILE_WARMUP, runs)
            information = self._information(session.context)
        return parse_layers(information, times, model=read_source(self.model))

    def device_memory(self) -> tuple[int, int]:
        """Bytes on the GPU that another process with such an engine takes, and that are free now.

        The former is the decrease of free memory when this engine was built and bound, at least the size of its
        plan, and a CUDA context. Memory that other processes took in the meantime is counted as well.
        """
        return self._held + _CONTEXT_BYTES, cuda.memory()[0]

    def close(self) -> None:
        """Free everything on the GPU; closing twice has no effect."""
        if self._native is not None:
            for opened in (*self._bound.values(), self._runner):
                if opened is not None:
                    opened.close()
            self._stream.close()
        super().close()

    def _open(self, feeds: Mapping[str, Array], profile: int | None = None) -> Execution:
        given = self._ports, feeds, self._stream, self._log, self.model
        return Execution(self._require_open(), *given, profile=profile)

    def _information(self, context: trt.IExecutionContext | None = None) -> str:
        """The inspector's information on the layers, with a context for the shapes set there; or the logged kernels."""
        import tensorrt as trt

        built = self._require_open()
        if built.kernels:
            return built.kernels
        inspector = built.engine.create_engine_inspector()
        if context is not None:
            inspector.execution_context = context
        return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def graph_hash(information: str, model: Path) -> str:
    """Hash the layers of an engine: kernels, types, formats and origins, without numbers of a build.

    Values of weights and scales are not in the layer information, so engines with equal hashes run the same
    kernels, on values that may differ. A part of the model reported as one opaque layer, by the names of its
    first and last node, may contain anything: then the model itself is hashed too.
    """
    if information.startswith(KERNELS):
        return kernel_list_hash(information)
    with suppress(ValueError):  # text that is not JSON, as by a quote in a name, is hashed as it is
        information = json.dumps(json.loads(information, strict=False), sort_keys=True)
    text = _NUMBERED.sub("", information)
    digest = hashlib.sha256(text.encode())
    if _OPAQUE in text:
        with model.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


backend = TensorRt
