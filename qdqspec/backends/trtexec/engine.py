"""TensorRT through its command-line tool, versions 10 and 11.

For machines without Python bindings, and for measurements comparable with published ones. Every call starts a process
that loads the engine again, in one or two seconds; `run` passes values as text and is meant for a few samples. Both
major versions get the same flags: strongly typed, CUDA graph, spin wait, no transfers, profile in a separate run.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from qdqspec._core.arrays import Array
from qdqspec._core.files import TemporaryFolder
from qdqspec._core.options import ARGUMENTS, LIBRARIES, PATH, declare, option, plugin_libraries, whole
from qdqspec.backends._cpu import major_minor, slug_from_text
from qdqspec.backends._engine import BoundEngine
from qdqspec.backends.base import PLAIN, Availability, BuildOptions, Capabilities
from qdqspec.backends.tensorrt.build import trtexec_option
from qdqspec.backends.tensorrt.cache import Shared
from qdqspec.backends.tensorrt.device import capability_of, gpu_facts
from qdqspec.backends.tensorrt.layers import parse_layers, read_times
from qdqspec.backends.tensorrt.ops import capabilities
from qdqspec.backends.trtexec import process
from qdqspec.backends.trtexec.process import Report, Tool
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.graph import Model, load_model
from qdqspec.types import DeviceKey, LayerTime, Samples

_OLDEST = 10  # major: earlier ones have no strongly typed networks
_STRONG = "--stronglyTyped"
# With one of these, which exist in 10 only, TensorRT chooses the types.
_WEAK = frozenset({"--fp16", "--bf16", "--int8", "--fp8", "--int4", "--best"})
_FORMATS = ("int8", "fp8")  # per-tensor activations; blocked formats go through backend tensorrt
_PROFILED_RUNS = 50  # at least: single runs are short, and each layer is timed to half a microsecond
_DEVICE = "--device="
_PATIENCE = 0.95  # of a build's limit: slightly less than the caller's, so that the reason is reported


@dataclass(frozen=True, slots=True, kw_only=True)
class TrtexecOptions:
    """The options after ``trtexec.`` in the configuration. Fresh builds use no timing cache."""

    args: tuple[str, ...] = option(
        ARGUMENTS, "More arguments for trtexec.", (), shown="", in_files=False, flag="trtexec-args"
    )
    plugins: tuple[Path, ...] = plugin_libraries()
    timing_cache: Path | None = option(
        PATH, "The file that builds of a run share.", shown="one in the run's folder", in_files=False
    )
    warmup_ms: int = option(whole(0), "How long an engine runs before it is timed.", 500)


OPTIONS = declare("trtexec", TrtexecOptions)


class Trtexec:
    """The trtexec executable on PATH, or in the folders where packages install it."""

    name = "trtexec"
    target = "trtexec"
    options = OPTIONS

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """Report whether a working trtexec is available, its version, and the GPU it will use."""
        try:
            tool = process.require_tool()
        except BackendUnavailableError as error:
            return Availability(usable=False, why=error.what, install=error.cure or process.INSTALL)
        facts = {"trtexec": tool.path, "TensorRT": tool.release, **gpu_facts(_gpu_index(options))}
        if tool.version[0] < _OLDEST:
            why = f"TensorRT {tool.release} is too old: networks cannot be strongly typed before 10"
            return Availability(usable=False, why=why, install=process.INSTALL, facts=facts)
        return Availability(usable=True, facts=facts)

    def device(self, options: BuildOptions) -> DeviceKey:
        """GPU, compute capability and TensorRT's major.minor; host threads do not matter."""
        facts = gpu_facts(_gpu_index(options))
        version = "unknown" if process.find_trtexec() is None else process.require_tool().release
        gpu = slug_from_text(facts.get("GPU", "unknown-gpu"))
        capability = facts.get("compute capability", "").replace(".", "")
        product = f"{gpu}-sm{capability}" if capability else gpu
        key = f"{product}-trtexec-{major_minor(version)}"
        return DeviceKey(key=key, details={**facts, "TensorRT": version})

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:
        """Those of TensorRT: symmetric, biases in float, by compute capability."""
        version = process.require_tool().version[:2] if process.find_trtexec() else (0, 0)
        found = capabilities(capability_of(gpu_facts(_gpu_index(options))), version)
        others = [name for name in found.formats if name not in _FORMATS]
        elsewhere = {name: f"{name} goes through backend tensorrt" for name in others}
        formats = tuple(name for name in found.formats if name in _FORMATS)
        return replace(found, formats=formats, lacking={**found.lacking, **elsewhere})

    def build(self, model: Path, options: BuildOptions) -> TrtexecEngine:
        """Build an engine file in a temporary folder."""
        tool = process.require_tool()
        loaded = load_model(model)
        folder = TemporaryFolder()
        try:
            return TrtexecEngine(tool, loaded, folder, options)
        except BaseException:
            folder.close()
            raise


class TrtexecEngine(BoundEngine[Tool, dict[str, Array]]):
    """An engine file, its layers, and the inputs it is timed with."""

    def __init__(self, tool: Tool, model: Model, folder: TemporaryFolder, options: BuildOptions) -> None:
        super().__init__(Path(model.where), tool)
        # By content: two builds of one model may take different kernels, and are still the same graph.
        self.graph_hash = model.sha256
        self._model = model
        self._temporary, self._folder = folder, folder.path
        self._words = OPTIONS.of(options.extra)
        self._device = options.device
        plan = self._folder / "engine.plan"
        shapes = process.shape_words(model, options.profiles)
        words = [f"--onnx={self.model}", f"--saveEngine={plan}", "--skipInference", *shapes]
        words += ["--profilingVerbosity=detailed", f"--exportLayerInfo={self._folder / 'layers.json'}"]
        if not _WEAK.intersection(self._words.args):
            words.append(_STRONG)
        shared = Shared(options.state, "trtexec", fresh=options.fresh)
        cache = self._words.timing_cache or self._folder / "timing.cache"
        if not options.fresh and (options.state or self._words.timing_cache):
            cache.parent.mkdir(parents=True, exist_ok=True)
            words.append(f"--timingCacheFile={cache}")
            if not self._words.timing_cache and (known := shared.read()):
                cache.write_bytes(known)
        self._notes = self._run(words, _PATIENCE * options.build_seconds).notes
        if not plan.is_file():
            raise BackendError("trtexec passed and wrote no engine", where=self.model)
        if not self._words.timing_cache and cache.is_file():
            shared.write(cache.read_bytes())

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and read the outputs, with the six digits that trtexec writes."""
        tool = self._require_open()
        process.check_feeds(self._model, feeds)
        outputs = self._folder / "outputs.json"
        outputs.unlink(missing_ok=True)
        words = ["--iterations=1", "--duration=0", "--warmUp=0", f"--exportOutput={outputs}"]
        # Outputs stay on the GPU unless they are transferred: by default up to 10, with this option from 11 on.
        words += ["--includeDataTransfers"] if tool.version[0] > _OLDEST else []
        self._call([*words, *self._inputs(feeds)])
        return process.read_outputs(self._text(outputs), self._model)

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs that `time` and `layers` use at a profile."""
        self._require_open()
        process.check_feeds(self._model, feeds)
        self._bound[profile] = dict(feeds)

    def time(self, runs: int, warmup: int = 0, profile: int = 0) -> Samples:  # noqa: ARG002 - warms up by time, not by runs
        """GPU compute time of the last ``runs`` runs of one process, without transfers."""
        times = self._folder / "times.json"
        times.unlink(missing_ok=True)
        words = [f"--iterations={runs}", "--duration=0", f"--warmUp={self._words.warmup_ms}"]
        words += [*process.MEASURING, f"--exportTimes={times}"]
        report = self._call([*words, *self._bound_words(profile)])
        notes = tuple(dict.fromkeys((*self._notes, *report.notes)))
        return Samples(wall_ms=read_times(self._text(times))[-runs:], notes=notes)

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per layer, from a run with TensorRT's profiler: the sum exceeds the time of a run without it."""
        bound = self._bound_words(profile)
        graph, times = self._folder / "layers.json", self._folder / "profile.json"
        times.unlink(missing_ok=True)
        words = [f"--iterations={max(runs, _PROFILED_RUNS)}", "--duration=0", "--warmUp=200"]
        words += ["--dumpProfile", f"--exportProfile={times}", *process.MEASURING]
        self._call([*words, *bound])
        return parse_layers(self._text(graph), self._text(times), model=self._model)

    def close(self) -> None:
        """Remove the engine; closing twice has no effect."""
        super().close()
        self._temporary.close()

    def _call(self, words: list[str]) -> Report:
        return self._run([f"--loadEngine={self._folder / 'engine.plan'}", *words], process.CALL_SECONDS)

    def _run(self, words: list[str], seconds: float) -> Report:
        """Run trtexec. The user's arguments replace the default ones: of an option given twice trtexec uses either."""
        own = {word.partition("=")[0] for word in self._words.args}
        words = [*words, f"{_DEVICE}{self._device}"] if self._device else words
        words = [*words, *map(trtexec_option, self._words.plugins)]
        words = [word for word in words if word.partition("=")[0] not in own]
        return self._require_open().run([*words, *self._words.args], model=self.model, seconds=seconds)

    def _bound_words(self, profile: int) -> list[str]:
        feeds = self._require_bound(profile)
        return [*([f"--useProfile={profile}"] if profile else []), *self._inputs(feeds)]

    def _inputs(self, feeds: Mapping[str, Array]) -> list[str]:
        """``--shapes`` of the dynamic inputs, and ``--loadInputs`` with a file of each input's bytes."""
        words, files = list[str](), list[str]()
        if dynamic := process.dynamic_inputs(self._model):
            words.append(f"--shapes={process.joined({name: feeds[name].shape for name in dynamic})}")
        for index, name in enumerate(self._model.inputs if feeds else ()):
            path = self._folder / f"input-{index}.bin"
            path.write_bytes(np.ascontiguousarray(feeds[name]).tobytes())
            files.append(f"{process.quoted(name)}:{path}")
        return [*words, f"--loadInputs={','.join(files)}"] if files else words

    def _text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            what = f"trtexec passed and wrote no {path.name}: {error.strerror}"
            cure = "leave an option that names another file for it out of trtexec.args"
            raise BackendError(what, where=self.model, cure=cure) from None


def replay_command(model: Model, file: str, options: BuildOptions) -> str:
    """The command that builds and times ``file``, a candidate of ``model``, with the plugins and arguments of a run."""
    text = options.extra.get("trtexec.plugins") or options.extra.get("tensorrt.plugins", "")
    own = OPTIONS.of({name: value for name, value in options.extra.items() if name == "trtexec.args"}).args
    words = [f"--onnx={file}", *process.shape_words(model, options.profiles)]
    words += map(trtexec_option, LIBRARIES.read(text))
    words += [f"{_DEVICE}{options.device}"] if options.device else []
    words += [] if _WEAK.intersection(own) else [_STRONG]
    given = {word.partition("=")[0] for word in own}
    words = [word for word in (*words, *process.MEASURING) if word.partition("=")[0] not in given]
    return shlex.join(["trtexec", *words, *own])


def _gpu_index(options: BuildOptions) -> int:
    """The GPU selected by the user's arguments, else that of the run."""
    given = [word for word in OPTIONS.of(options.extra).args if word.startswith(_DEVICE)]
    chosen = given[-1].removeprefix(_DEVICE) if given else ""
    return int(chosen) if chosen.isdecimal() else options.device


backend = Trtexec
