"""The parts of a first day on a GPU. Each runs in a process of its own, writes files into a folder and returns facts.

The files of an engine have the names and formats of recorded ones: NAME.graph.json, NAME.profile.json, NAME.times.json,
NAME.profile.metadata.json, NAME.builds.jsonl, and NAME.log with TensorRT's whole log.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx

from qdqspec.arrays import Array
from qdqspec.backends._cpu import slug_from_text
from qdqspec.backends._nvidia import cuda
from qdqspec.backends._nvidia.smi import gpu_settings, gpu_state
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.tensorrt.api import parts
from qdqspec.backends.tensorrt.build import build_routes, exports_creators, parse_model
from qdqspec.backends.tensorrt.engine import TensorRt, TensorRtEngine
from qdqspec.backends.tensorrt.gpu_day import models
from qdqspec.backends.tensorrt.gpu_day.models import REFUSED
from qdqspec.backends.tensorrt.layers import read_times
from qdqspec.backends.tensorrt.log import open_log
from qdqspec.backends.tensorrt.options import options_from
from qdqspec.backends.trtexec.log import Report
from qdqspec.backends.trtexec.process import MEASURING, Tool, require_tool
from qdqspec.errors import BackendUnavailableError, ConfigError
from qdqspec.graph.model import Model
from qdqspec.graph.reference import evaluator_of
from qdqspec.lint import lint_model
from qdqspec.parity.compare import sqnr_db
from qdqspec.types import InputShape, Samples, ShapeProfile

Facts: TypeAlias = dict[str, Any]

RUNS = 200
SCRATCH = "scratch"
LARGE_MIB = 2200  # weights of the large model
_WARMUP = 20
_CLOSE = 0.03  # largest difference between the medians of the Python API and of trtexec
_ASK_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """The folder and build settings of a part. ``large_mib`` is the size of the large model's weights."""

    folder: Path
    device: int = 0
    extra: Mapping[str, str] = field(default_factory=dict)
    large_mib: int = LARGE_MIB

    @property
    def scratch(self) -> Path:
        """A folder for files that the archive does not contain."""
        path = self.folder / SCRATCH
        path.mkdir(exist_ok=True)
        return path


@dataclass(frozen=True, slots=True, kw_only=True)
class DayPart:
    """One part: the question that its files answer, its time limit in seconds, and its function."""

    name: str
    asks: str
    run: Callable[[Day], Facts]
    seconds: float = 300.0


# ---- machine ------------------------------------------------------------------------------------


def _machine(day: Day) -> Facts:
    """The GPU, its driver and state, and the installed packages."""
    packages = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    lines = [f"{name}=={version}" for name, version in sorted(packages.items()) if name]
    (day.folder / "pip-freeze.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _keep_output(["nvidia-smi", "-q"], day.folder / "nvidia-smi-q.txt")
    found: Facts = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": len(lines),
    }
    gpu, address = cuda.describe(day.device), cuda.bus_id(day.device)
    state = gpu_state(address)
    return found | {
        "gpu": gpu.name,
        "compute_capability": ".".join(map(str, gpu.capability)),
        "memory_gib": round(gpu.memory_bytes / 2**30, 1),
        "driver_cuda": gpu.driver,
        "runtime_cuda": gpu.runtime,
        "sm_mhz": None if state is None else state.sm_mhz,
        "throttled": [] if state is None else list(state.throttled),
        **gpu_settings(address),
    }


def _keep_output(command: Sequence[str], path: Path) -> None:
    """Run a tool, and write all that it prints to a file."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False, errors="replace"
    )
    path.write_text(done.stdout + done.stderr, encoding="utf-8")


def _trtexec_help(day: Day) -> Facts:
    """The options of trtexec."""
    tool = require_tool()
    _keep_output([tool.path, "--help"], day.folder / "trtexec-help.txt")
    return {"options": len(tool.options), "version": list(tool.version or ())}


def _routes(day: Day) -> Facts:
    """The compiler's knobs, which TensorRT lists from version 11 on."""
    cuda.select(day.device)
    text = build_routes(open_log()[1])
    (day.folder / "build-routes.json").write_text(text or "{}", encoding="utf-8")
    return {"characters": len(text)}


# ---- engines ------------------------------------------------------------------------------------


def _built(day: Day, name: str, make: Callable[[], Model]) -> Facts:
    """Build, time and profile a model, and compare its outputs with ONNX's reference implementation."""
    model = make()
    path = _saved(model, day.folder / f"{name}.onnx")
    return _engine(day, name, path, models.feeds_for(model), exact=model)


def _resnet(day: Day, placement: str) -> Facts:
    name, model = f"resnet18-{placement}", models.resnet18(placement)
    path = _saved(model, day.scratch / f"{name}.onnx")  # 23 MB, made again from its name
    return _engine(day, name, path, models.feeds_for(model))


def _shapes(day: Day) -> Facts:
    """Two optimization profiles, each timed at its ``opt``."""
    model = models.three_layers(batch="n")
    spans = [(1, 1, 4), (8, 16, 16)]
    shapes = [[(batch, *models.IMAGE[1:]) for batch in span] for span in spans]
    profiles = [ShapeProfile(shapes={"x": InputShape(min=a, opt=b, max=c)}) for a, b, c in shapes]
    path = _saved(model, day.folder / "shape-profiles.onnx")
    feeds = [models.feeds_for(model, usual) for _, usual, _ in shapes]
    return _engine(day, "shape-profiles", path, feeds[0], profiles=profiles, others=feeds[1:])


def _large(day: Day) -> Facts:
    """A model whose weights exceed the 2 GB of a protobuf file."""
    path = day.scratch / "large.onnx"
    models.write_large(path, day.large_mib)
    rows = onnx.load(path, load_external_data=False).graph.input[0].type.tensor_type.shape.dim[1].dim_value
    feeds: dict[str, Array] = {"x": np.ones((1, rows), np.float16)}
    return _engine(day, "large", path, feeds) | {"weights_mib": day.large_mib}


def _plugins(day: Day) -> Facts:
    """The given plugin libraries are loaded and the small model is built beside them; how each is loaded."""
    if "tensorrt.plugins" not in day.extra:
        raise BackendUnavailableError("no plugin library was given", cure="name one with --plugin LIB.so")
    found = _built(day, "plugins", models.three_layers)
    kinds = {
        library.name: "plugin registry" if exports_creators(library) else "system loader"
        for library in options_from(day.extra).plugins
    }
    return found | {"libraries": kinds}


def _engine(
    day: Day,
    name: str,
    path: Path,
    feeds: Mapping[str, Array],
    *,
    profiles: Sequence[ShapeProfile] = (),
    others: Sequence[Mapping[str, Array]] = (),
    exact: Model | None = None,
) -> Facts:
    """Build a model and write the recordings of its engine; ``others`` are the inputs of further shape profiles."""
    stem = day.folder / f"{_prefix(day)}-{name}"
    extra = {**day.extra, "tensorrt.verbose": "on"}
    options = BuildOptions(device=day.device, extra=extra, profiles=tuple(profiles), state=day.scratch)
    try:
        with closing(TensorRt().build(path, options)) as engine:
            found = _measured(engine, stem, feeds)
            for number, more in enumerate(others, start=1):
                engine.bind(more, number)
                found[f"median_ms_profile_{number}"] = _median_ms(engine, number)
            if exact is not None:
                found |= _error(engine, exact, feeds)
            return found
    finally:
        builds = day.scratch / "builds.jsonl"
        if builds.is_file():
            shutil.copyfile(builds, f"{stem}.builds.jsonl")


def _measured(engine: TensorRtEngine, stem: Path, feeds: Mapping[str, Array]) -> Facts:
    engine.bind(feeds)
    samples = engine.time(RUNS, _WARMUP)
    _write_times(stem, samples)
    graph, profile = engine.recorded()
    Path(f"{stem}.graph.json").write_text(graph, encoding="utf-8")
    whole = sum(layer["averageMs"] for layer in profile if "name" in layer) or 1.0
    rows = [
        layer | {"percentage": round(100 * layer["averageMs"] / whole, 4)} if "name" in layer else layer
        for layer in profile
    ]
    Path(f"{stem}.profile.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return {
        "median_ms": statistics.median(samples.wall_ms),
        "layers": len(rows) - 1,
        "graph_hash": engine.graph_hash,
        "notes": list(samples.notes),
    }


def _median_ms(engine: TensorRtEngine, profile: int = 0) -> float:
    return statistics.median(engine.time(RUNS, _WARMUP, profile).wall_ms)


def _write_times(stem: Path, samples: Samples) -> None:
    rows = [{"computeMs": each} for each in samples.wall_ms]
    Path(f"{stem}.times.json").write_text(json.dumps(rows), encoding="utf-8")
    times = sorted(samples.wall_ms)
    late = times[int(0.99 * (len(times) - 1))]
    summary = [times[0], times[-1], statistics.fmean(times), statistics.median(times), late]
    summaries = {"performance_summary": {"GPU Compute Time": summary}}
    Path(f"{stem}.profile.metadata.json").write_text(json.dumps(summaries), encoding="utf-8")


def _error(engine: TensorRtEngine, model: Model, feeds: Mapping[str, Array]) -> Facts:
    """The SQNR of the engine's output against ONNX's reference implementation of the same model."""
    computed = np.asarray(engine.run(feeds)["y"], np.float64)
    (output,) = evaluator_of(model.proto).run(None, dict(feeds))
    exact = np.asarray(output, np.float64)
    value = sqnr_db(float(np.square(exact).sum()), float(np.square(exact - computed).sum()))
    return {"sqnr_db": value if np.isfinite(value) else None, "equal": bool(np.array_equal(exact, computed))}


def _saved(model: Model, path: Path) -> Path:
    onnx.save(model.proto, path)
    return path


def _prefix(day: Day) -> str:
    """``trt10.16.1.11-nvidia-h100-pcie``, with which recordings begin."""
    import tensorrt as trt

    return f"trt{trt.__version__}-{slug_from_text(cuda.describe(day.device).name)}"


# ---- trtexec ------------------------------------------------------------------------------------


def _by_trtexec(day: Day) -> Facts:
    """The small model built and timed by trtexec, with all the files that it exports."""
    tool = require_tool()
    stem = day.folder / f"trtexec{'.'.join(map(str, tool.version or ()))}-three-layers"
    path = _saved(models.three_layers(), day.folder / "three-layers.onnx")
    wanted = [
        *MEASURING, "--stronglyTyped", "--verbose", "--profilingVerbosity=detailed", "--dumpProfile",
        f"--exportLayerInfo={stem}.graph.json",
    ]  # fmt: skip
    plan = day.scratch / "engine.plan"
    words = [f"--onnx={path}", f"--saveEngine={plan}", "--skipInference", *_device(day)]
    tool.run(words, model=path, seconds=_ASK_SECONDS * 4, wanted=wanted)
    exports = ["--dumpProfile", f"--exportProfile={stem}.profile.json"]
    report = _timed_by(tool, day, path, plan, stem, wanted=exports)
    return {"median_ms": report.median_ms, "notes": list(report.notes)}


def _timed_by(
    tool: Tool,
    day: Day,
    model: Path,
    plan: Path,
    stem: Path,
    *,
    words: Sequence[str] = (),
    wanted: Sequence[str] = (),
) -> Report:
    """Time an engine file of a model with trtexec, which writes ``STEM.times.json``."""
    words = [f"--loadEngine={plan}", f"--iterations={RUNS}", "--duration=0", *words, *_device(day)]
    wanted = [*MEASURING, f"--exportTimes={stem}.times.json", *wanted]
    return tool.run(words, model=model, seconds=_ASK_SECONDS, wanted=wanted)


def _cross_check(day: Day) -> Facts:
    """One engine timed by the Python API, by trtexec, and by the Python API again."""
    tool = require_tool()
    model = models.three_layers()
    path = _saved(model, day.folder / "cross-check.onnx")
    stem = day.folder / "cross-check"
    plan = day.scratch / "engine.plan"
    options = BuildOptions(device=day.device, extra=day.extra, state=day.scratch)
    with closing(TensorRt().build(path, options)) as engine:
        engine.save(plan)
        engine.bind(models.feeds_for(model))
        before = _median_ms(engine)
        _timed_by(tool, day, path, plan, stem, words=["--warmUp=500"])
        after = _median_ms(engine)
    ours = statistics.fmean((before, after))
    theirs = statistics.median(read_times(Path(f"{stem}.times.json").read_text(encoding="utf-8")))
    return {
        "python_ms": [before, after],
        "trtexec_ms": theirs,
        "ratio": ours / theirs,
        "agrees": abs(ours / theirs - 1) <= _CLOSE,
    }


def _device(day: Day) -> list[str]:
    return [f"--device={day.device}"] if day.device else []


# ---- what the parser rejects --------------------------------------------------------------------


def _rejected(day: Day, rule: str) -> Facts:
    """Parse the model that breaks a lint rule; lint for this version and the parser should agree."""
    import tensorrt as trt

    cuda.select(day.device)
    model = REFUSED[rule].model()
    log, logger = open_log()
    rejections = parse_model(_saved(model, day.folder / f"{rule}.onnx"), log, logger)
    target = "tensorrt-{}.{}".format(*parts(trt.__version__))
    (day.folder / f"{rule}.json").write_text(
        json.dumps({"rule": rule, "parser": rejections}, indent=1), encoding="utf-8"
    )
    try:
        titles = [found.title for found in lint_model(model, target) if found.id == rule]
    except ConfigError:  # lint has no target for this version
        return {"parser_rejects": bool(rejections), "lint_reports": None}
    return {
        "parser_rejects": bool(rejections),
        "lint_reports": bool(titles),
        "lint": titles,
        "agrees": bool(rejections) == bool(titles),
    }


# ---- all ----------------------------------------------------------------------------------------


def _three(*formats: str, dtype: str = "float32") -> Callable[[], Model]:
    return partial(models.quantized_three_layers, formats, dtype)


_FORMATS: Mapping[str, tuple[str, Callable[[], Model]]] = {
    "float16": ("the reference in float16", partial(models.three_layers, "float16")),
    "int8": ("int8 pairs on every layer", _three("int8")),
    "int8-float16": ("int8 pairs in a float16 model", _three("int8", dtype="float16")),
    "fp8": ("fp8 pairs on every layer", _three("fp8")),
    "int8+fp8": ("int8 and fp8 in one network (rule TRT056)", _three("int8", "fp8")),
    "int4": ("int4 weights in blocks", partial(models.linear, "int4")),
    "nvfp4": ("NVFP4 weights and activations", partial(models.linear, "nvfp4")),
    "mxfp8": ("MXFP8 weights and activations", partial(models.linear, "mxfp8")),
}

PARTS: tuple[DayPart, ...] = (
    DayPart(name="machine", asks="GPU, driver, clocks, packages", run=_machine, seconds=120.0),
    DayPart(
        name="three-layers",
        asks="does a small float32 model build, run and get timed, and are its outputs right",
        run=partial(_built, name="three-layers", make=models.three_layers),
    ),
    DayPart(name="trtexec-help", asks="the options of trtexec", run=_trtexec_help, seconds=120.0),
    DayPart(name="trtexec", asks="log and exported files of trtexec", run=_by_trtexec),
    DayPart(
        name="cross-check",
        asks="does trtexec measure the same as the Python API, within 3 %",
        run=_cross_check,
    ),
    DayPart(name="build-routes", asks="the compiler's knobs (TensorRT 11)", run=_routes, seconds=120.0),
    *(
        DayPart(
            name=name,
            asks=f"does it build, how fast and how accurate: {asks}",
            run=partial(_built, name=name, make=make),
        )
        for name, (asks, make) in _FORMATS.items()
    ),
    DayPart(name="shape-profiles", asks="two optimization profiles, each timed through its own", run=_shapes),
    DayPart(name="plugins", asks="are the given plugin libraries loaded", run=_plugins),
    *(
        DayPart(
            name=f"resnet18-{placement}",
            asks="is the order of NVIDIA's recorded placements reproduced",
            run=partial(_resnet, placement=placement),
            seconds=600.0,
        )
        for placement in models.PLACEMENTS
    ),
    DayPart(name="large", asks="does a model above 2 GB build", run=_large, seconds=900.0),
    *(
        DayPart(
            name=f"refused-{rule}",
            asks=f"does the parser reject what lint rule {rule} reports",
            run=partial(_rejected, rule=rule),
            seconds=_ASK_SECONDS,
        )
        for rule in REFUSED
    ),
)
BY_NAME = {part.name: part for part in PARTS}
