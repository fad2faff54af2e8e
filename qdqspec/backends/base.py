"""The seam between qdqspec and a runtime. May import floor 0 and numpy's types only.

A backend builds a model file into an engine; an engine runs, times and explains itself. Neither knows
of placements, searches or specs. A backend that fails raises `BackendError`; one that crashes is
contained by `qdqspec.measure.isolate`, which offers this same seam from a child process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from qdqspec.config import Settings
from qdqspec.config.declared import BackendOptions
from qdqspec.types import DeviceKey, Kind, LayerTime, Samples, ShapeProfile

Array = npt.NDArray[np.generic]
BUILD_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Whether a backend works on this machine; if not, ``why`` and ``install`` say what is missing."""

    usable: bool
    why: str = ""
    install: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)  # versions, instruction sets: what `doctor` prints


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do with Q/DQ on this device.

    ``labels[op_type]`` lists the kinds of labels (besides ``fp``) under which an op runs in integers, and
    ``labels_of[format]`` the same for a format that is offered on other ops;
    ``activations[format]`` and ``weights[format]`` give the dtypes that a format is stored in, as names of
    `qdqspec.quantize.formats` (``int8`` means uint8 activations and int8 weights on ONNX Runtime); a format in
    blocks without activations here is for weights alone;
    ``absorbs`` are ops that fuse into the quantized producer before them, so that the Q stands after them;
    ``integer_bias`` are linear ops that run ``in-only`` on integers only with an int32 bias behind a DQ;
    ``bare`` are linear ops that run ``in-only`` on integers only where nothing is absorbed right behind them;
    ``blocked_axes[op_type]`` are the axes along which the op takes a two-dimensional weight in a blocked format;
    ``rules`` are names of `qdqspec.placement.rules`, for what a compiler wants beyond single operators;
    ``observes`` is false where outputs come back too slowly to calibrate with: ONNX Runtime does it then.
    ``computes`` is false on a simulated device: there placements are neither rehearsed nor corrected;
    ``dynamic[format]`` are the ops with a constant weight that have a kernel which finds the range of its activation at
    run time, with weights in that format;
    ``lacking[format]`` says why a format that the backend has elsewhere is not one of ``formats`` here;
    ``builds_side_by_side`` is true where a build times no kernels, so that several at once come to the same;
    ``one_processor`` where an engine of one thread computes on the processor of the thread that runs it, so that
    engines can be compared on the same one;
    ``fuses_in_half`` is true where narrow kernels fuse as those of float16 do, so that what fuses is looked up there;
    ``computes_in_half`` where it has kernels of its own for float16, so that a model in float16 is worth a look.
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
    blocked_axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    rules: frozenset[str] = frozenset()
    per_layer_profile: bool = True
    dynamic_shapes: bool = True
    observes: bool = True
    computes: bool = True
    builds_side_by_side: bool = False
    one_processor: bool = False
    fuses_in_half: bool = False
    computes_in_half: bool = False
    lacking: Mapping[str, str] = field(default_factory=dict)
    dynamic: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def kinds(self, number_format: str, op_type: str) -> tuple[Kind, ...]:
        """The kinds of labels under which an op runs in a format that has no blocks."""
        kinds = self.labels_of.get(number_format, self.labels).get(op_type, ())
        return (*kinds, "dynamic") if op_type in self.dynamic.get(number_format, ()) else kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How to build: worker threads and backend-specific words from configuration.

    ``device`` is the index of the GPU, where the backend uses one. ``serial`` counts the builds of a run; a
    simulated device draws the deviation of a build from it. ``profiles`` are the shapes that inputs with dynamic
    dimensions will have. A build that takes longer than ``build_seconds`` is ended. ``state`` is a folder in which a
    backend keeps what the builds of one run share, such as a timing cache; it stays with the results.
    A ``fresh`` build takes nothing from there that could make it like an earlier one: it is to show how much two
    builds differ.
    """

    threads: int = 1
    extra: Mapping[str, str] = field(default_factory=dict)
    device: int = 0
    serial: int = 0
    profiles: tuple[ShapeProfile, ...] = ()
    build_seconds: float = BUILD_SECONDS
    state: Path | None = None
    fresh: bool = False

    @classmethod
    def of(cls, settings: Settings) -> BuildOptions:
        """What the settings of a run say of building."""
        limit = settings.build_limit or BUILD_SECONDS
        return cls(
            threads=settings.threads, device=settings.device, extra=settings.extra, build_seconds=limit
        )


PLAIN = BuildOptions()  # one thread, the first GPU, nothing else said


class Engine(Protocol):
    """A model ready to run. Not thread-safe; close it when done."""

    graph_hash: str  # of the optimized graph: equal hashes run the same kernels on the same values

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        ...

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs that `time` and `layers` use at one of the shape profiles, those of the others staying."""
        ...

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        """Time single runs on both clocks, in milliseconds, after ``warmup`` untimed ones."""
        ...

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per executed kernel, mapped back to node names of the model without Q/DQ; empty if unknown."""
        ...

    def close(self) -> None:
        """Free the engine; closing twice does no harm."""
        ...


class Backend(Protocol):
    """A runtime. Constructing one imports nothing heavy; `probe` and `build` do."""

    name: str
    target: str  # backend and variant, as budgets and lint name it: onnxruntime-cpu
    options: BackendOptions  # every option that it accepts; a word that is not declared is refused

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """Say whether it is usable here, and how to get it if not. Never raises."""
        ...

    def device(self, options: BuildOptions) -> DeviceKey:
        """What results are keyed by: product, instruction set, backend major.minor, threads."""
        ...

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:
        """What may be quantized on the device that is chosen, and how."""
        ...

    def build(self, model: Path, options: BuildOptions) -> Engine:
        """Build the ONNX file into an engine; raise `BackendError` with the runtime's reason."""
        ...
