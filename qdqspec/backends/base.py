"""The interface between qdqspec and a runtime.

A backend builds a model file into an engine; an engine runs, times and profiles it. Backends do not depend
on placements, searches or specs. A backend that fails raises `BackendError`; a crash of a backend is
contained by `qdqspec.backends.isolation.isolated`, which offers the same interface from a child process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from qdqspec.arrays import Array as Array
from qdqspec.config import Settings
from qdqspec.config.declared import BackendOptions
from qdqspec.config.hooks import Hook
from qdqspec.errors import BackendUnavailableError
from qdqspec.registry import resolve
from qdqspec.types import Case, DeviceKey, Kind, LayerTime, Samples, ShapeProfile

BUILD_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether a backend works on this machine; if not, ``why`` and ``install`` state what is missing."""

    usable: bool
    why: str = ""
    install: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)  # versions, instruction sets: printed by `doctor`

    def with_formats(
        self, case: Case, formats: Sequence[str], lacking: Mapping[str, str], words: tuple[str, str, str]
    ) -> Availability:
        """The same; not usable if the device has none of the case's number formats.

        ``words`` are the name of the backend, where it runs (``on this device``), and what else to choose.
        """
        wanted, (name, where, other) = case.quantize.formats, words
        if not set(wanted).isdisjoint(formats):
            return self
        reasons = [f"; {lacking[each]}" for each in wanted if each in lacking]
        return replace(
            self,
            usable=False,
            why=f"{name} has no {' or '.join(wanted)} {where}{''.join(reasons)}",
            install=f"choose one of its formats ({', '.join(formats)}), or {other}",
        )

    def error(self, backend: str) -> BackendUnavailableError:
        """The error of a backend that is not usable."""
        what = f"backend {backend} is not usable here: {self.why}"
        return BackendUnavailableError(what, cure=self.install or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The support of a backend for Q/DQ models on this device.

    ``labels[op_type]`` lists the kinds of labels (besides ``fp``) under which an op runs in integers, and
    ``labels_of[format]`` the same for a format that is offered on other ops; ``activations[format]`` and
    ``weights[format]`` give the dtypes that a format is stored in, as names of `qdqspec.quantize.formats`
    (``int8`` means uint8 activations and int8 weights on a CPU); a blocked format without activations here is
    for weights alone; ``absorbs`` are ops that fuse into the quantized producer before them, so that the Q is
    inserted after them; ``integer_bias`` are linear ops that run ``in-only`` on integers only with an int32
    bias after a DQ; ``bare`` are linear ops that run ``in-only`` on integers only if no op is absorbed directly
    after them; ``constant_weight`` are ops that run on integers only if their weight is a constant, beside
    those for which that always holds (Conv); ``completes`` are ops whose float weight the runtime quantizes itself, if
    data and result are quantized, and ``moved_past`` are ops that it moves pairs past before that;
    ``rounds_biases`` are ops whose float bias it then stores as integers, in steps of the data's scale times
    the weight's; ``blocked_axes[op_type]`` are the axes along which the op takes a
    two-dimensional weight in a blocked format; ``carriers`` are ops past which a pair reaches the kernel of an op with
    a weight-only label, where that kernel takes only floats, and a product only operands of one format; empty where
    kernels take such pairs; ``rules`` are the functions of the backend's placement
    rules by name, in the order in which they are applied, for requirements of a compiler beyond single operators
    (`qdqspec.placement.space.units`); ``observes`` is false if outputs are returned too slowly for calibration: the
    default backend is used instead. ``computes`` is false on a simulated device: there
    placements are neither rehearsed nor corrected; ``dynamic[format]`` are the ops with a constant weight that
    have a kernel which computes the range of its activation at run time, with weights in that format;
    ``lacking[format]`` is the reason why a format of the backend is not one of ``formats`` on this device;
    ``builds_side_by_side`` is true if a build times no kernels, so that parallel builds give the same result;
    ``one_processor`` is true if an engine of one thread computes on the processor of the thread that runs it,
    so that compared engines can be pinned to the same core; ``fuses_in_half`` is true if quantized kernels fuse
    like those of float16, so that fusion is read from a float16 build; ``computes_in_half`` if it has native
    float16 kernels, so that a float16 model is timed for comparison; ``quantizes_half`` is false if no integer kernel
    takes pairs of float16 tensors, so that candidates of a float16 model are converted to float32; ``hardware`` names
    the device of engines, if other backends may run on it too; only one run is timed there at a time.
    ``enforces_output_shapes`` if a run fails where an output has another shape than the model declares. ``runs`` is
    false where engines can only be built, because the machine has no device for them: then outputs are computed as ONNX
    defines them. ``has_clock`` is false where nothing can be timed: then placements are selected by their coverage.
    ``needs_shapes`` if a build fails where the shape of an input is not known.
    """

    formats: tuple[str, ...]
    labels: Mapping[str, tuple[Kind, ...]]
    activations: Mapping[str, str]
    weights: Mapping[str, str]
    labels_of: Mapping[str, Mapping[str, tuple[Kind, ...]]] = field(default_factory=dict)
    absorbs: frozenset[str] = frozenset()
    reduce_range: bool = False  # 7-bit weights: 8-bit products would saturate on this CPU
    symmetric_activations: bool = False
    integer_bias: frozenset[str] = frozenset()
    bare: frozenset[str] = frozenset()
    constant_weight: frozenset[str] = frozenset()
    completes: frozenset[str] = frozenset()
    moved_past: frozenset[str] = frozenset()
    rounds_biases: frozenset[str] = frozenset()
    blocked_axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    carriers: frozenset[str] = frozenset()
    rules: Mapping[str, Hook] = field(default_factory=dict)
    per_layer_profile: bool = True
    observes: bool = True
    computes: bool = True
    builds_side_by_side: bool = False
    one_processor: bool = False
    hardware: str = ""  # cpu, gpu, npu; else the device is its own
    fuses_in_half: bool = False
    computes_in_half: bool = False
    quantizes_half: bool = True
    enforces_output_shapes: bool = False
    runs: bool = True
    has_clock: bool = True
    needs_shapes: bool = False
    lacking: Mapping[str, str] = field(default_factory=dict)
    dynamic: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def kinds(self, number_format: str, op_type: str) -> tuple[Kind, ...]:
        """The kinds of labels under which an op runs in a format without blocks."""
        kinds = self.labels_of.get(number_format, self.labels).get(op_type, ())
        return (*kinds, "dynamic") if op_type in self.dynamic.get(number_format, ()) else kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An engine as the runtime's own tools export it to files (`qdqspec.config.hooks.Declaration.exported`)."""

    layers: tuple[LayerTime, ...]
    has_times: bool  # whether the layers have measured times
    end_to_end_ms: float | None = None
    advice: str = ""  # how to export an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """Build options: worker threads and backend-specific options from the configuration.

    ``device`` is the index of the GPU, if the backend uses one. ``serial`` counts the builds of a run; a
    simulated device derives the variation of a build from it. ``profiles`` are the shapes of inputs with dynamic
    dimensions. A build that takes longer than ``build_seconds`` is terminated. ``state`` is a folder for data that a
    backend shares between the builds of one run, such as a timing cache; it is kept with the results.
    A ``fresh`` build uses nothing from there that could make it equal to an earlier one: it measures the variation
    between builds. An engine that is not ``hashed`` may have an empty `Engine.graph_hash`: nothing is compared with it.
    """

    threads: int = 1
    extra: Mapping[str, str] = field(default_factory=dict)
    device: int = 0
    serial: int = 0
    profiles: tuple[ShapeProfile, ...] = ()
    build_seconds: float = BUILD_SECONDS
    state: Path | None = None
    fresh: bool = False
    hashed: bool = True

    @classmethod
    def of(cls, settings: Settings) -> BuildOptions:
        """The build options in the settings of a run."""
        limit = settings.build_limit or BUILD_SECONDS
        return cls(
            threads=settings.threads, device=settings.device, extra=settings.extra, build_seconds=limit
        )


PLAIN = BuildOptions()  # one thread, the first GPU, no other options


class Engine(Protocol):
    """A model ready to run. Not thread-safe; close it when done.

    An engine on a GPU may have ``device_memory()``: bytes that it holds there, and that are free. Then memory is
    checked before several engines are open.
    """

    # of the optimized graph: equal hashes run the same kernels on the same values; may be empty unless it is `hashed`
    graph_hash: str

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        ...

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs that `time` and `layers` use at one shape profile; those of other profiles are kept."""
        ...

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        """Time single runs on both clocks, in milliseconds, after ``warmup`` untimed ones."""
        ...

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per executed kernel, mapped back to node names of the model without Q/DQ; empty if unknown."""
        ...

    def close(self) -> None:
        """Free the engine; closing twice has no effect."""
        ...


class Backend(Protocol):
    """A runtime. The constructor imports no large library; `probe` and `build` do."""

    name: str
    target: str  # backend and variant, joined by a hyphen, as named in budgets and lint
    options: BackendOptions  # every accepted option; an undeclared one is an error

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """Report whether the backend is usable on this machine, and how to install it if not. Never raises."""
        ...

    def device(self, options: BuildOptions) -> DeviceKey:
        """The key of results: product, instruction set, backend major.minor, threads."""
        ...

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:
        """The formats and labels that the backend supports on the selected device."""
        ...

    def build(self, model: Path, options: BuildOptions) -> Engine:
        """Build the ONNX file into an engine; raise `BackendError` with the runtime's reason."""
        ...


def backend_named(name: str) -> Backend:
    """An instance of the backend of that name. Raises `ConfigError` with the nearest known one."""
    entry = resolve("backend", name)
    return entry() if isinstance(entry, type) else entry  # type: ignore[return-value]  # registry knows no kinds
