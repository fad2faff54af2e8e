"""The interface between qdqspec and a runtime.

A backend builds a model file into an engine; an engine runs, times and profiles it. Backends do not depend
on placements, searches or specs. A backend that fails raises `BackendError`; a crash of a backend is
contained by `qdqspec.backends.isolation.isolated`, which offers the same interface from a child process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from qdqspec._core.arrays import Array as Array
from qdqspec._core.config import Settings
from qdqspec._core.options import BackendOptions
from qdqspec._core.registry import resolve
from qdqspec.errors import BackendUnavailableError
from qdqspec.qdq import Capabilities as Capabilities
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
class Exported:
    """An engine as the runtime's own tools export it to files (`qdqspec._core.hooks.Declaration.exported`)."""

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


def labels_of(*, alone: Iterable[str] = (), between: Iterable[str] = ()) -> dict[str, tuple[Kind, ...]]:
    """Labels by operator type: those ``alone`` take integers and also give floats, the others run ``between`` pairs."""
    both: tuple[Kind, ...] = ("in+out", "in-only")
    return {**dict.fromkeys(alone, both), **dict.fromkeys(between, both[:1])}


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

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs that `time` and `layers` use at one shape profile; those of other profiles are kept."""

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:
        """Time single runs on both clocks, in milliseconds, after ``warmup`` untimed ones."""

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per executed kernel, mapped back to node names of the model without Q/DQ; empty if unknown."""

    def close(self) -> None:
        """Free the engine; closing twice has no effect."""


class Backend(Protocol):
    """A runtime. The constructor imports no large library; `probe` and `build` do."""

    name: str
    target: str  # backend and variant, joined by a hyphen, as named in budgets and lint
    options: BackendOptions  # every accepted option; an undeclared one is an error

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """Report whether the backend is usable on this machine, and how to install it if not. Never raises."""

    def device(self, options: BuildOptions) -> DeviceKey:
        """The key of results: product, instruction set, backend major.minor, threads."""

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:
        """The formats and labels that the backend supports on the selected device."""

    def build(self, model: Path, options: BuildOptions) -> Engine:
        """Build the ONNX file into an engine; raise `BackendError` with the runtime's reason."""


def backend_named(name: str) -> Backend:
    """An instance of the backend of that name. Raises `ConfigError` with the nearest known one."""
    entry = resolve("backend", name)
    return entry() if isinstance(entry, type) else entry  # type: ignore[return-value]  # registry knows no kinds
