"""The behaviours of the stand-ins for TensorRT, CUDA, trtexec and nvidia-smi, each with its source.

A stand-in imitates only behaviour that a source states. `Behaviour.names` are classes and functions
of the stand-in, ``fault NAME`` are faults injected by ``FAKE_TRT`` or the ``fault`` of the stand-in.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

SUPPORT = Path(__file__).parent
FILES = {
    "tensorrt": SUPPORT / "fake_trt" / "tensorrt" / "__init__.py",
    "cuda": SUPPORT / "fake_trt" / "cuda" / "bindings" / "runtime.py",
    "GPU": SUPPORT / "fake_trt" / "fake_gpu.py",
    "trtexec": SUPPORT / "trtexec_standin.py",
    "nvidia-smi": SUPPORT / "nvidia_smi.py",
}
_BINDINGS = "the bindings' own signatures and docstrings, 10.9 to 11.4 (tests/data/tensorrt/api)"
_PYCORE = "NVIDIA/TensorRT release/11.1, python/src/infer/pyCore.cpp"
_HEADER = "NVIDIA/TensorRT release/11.1, include/NvInfer.h"
_RUNTIME = "NVIDIA/TensorRT release/11.1, include/NvInferRuntime.h"
_CUDA = "CUDA Runtime API, and the signatures of cuda-bindings 12.8, 12.9 and 13"
_SAMPLES = "recorded logs, tests/data/tensorrt/samples"
_OPTIONS = "NVIDIA/TensorRT, samples/common/sampleOptions.cpp, 10.9, 10.16 and 11.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """One behaviour of a stand-in."""

    standin: str
    names: tuple[str, ...]
    does: str
    source: str


def _of(standin: str, names: str, does: str, source: str) -> Behaviour:
    return Behaviour(standin=standin, names=tuple(re.split(r",\s+", names)), does=does, source=source)


BEHAVIOURS = (
    _of(
        "tensorrt",
        "ILogger, ILogger.log",
        "takes lines with a severity; calls that fail say why there only",
        _BINDINGS,
    ),
    _of("tensorrt", "IHostMemory, IHostMemory.nbytes", "holds a serialized engine", _BINDINGS),
    _of(
        "tensorrt",
        "ITensor, INetworkDefinition, INetworkDefinition.num_inputs, INetworkDefinition.get_input, "
        "IOptimizationProfile, IOptimizationProfile.set_shape",
        "gives inputs without constants; dynamic dimensions are -1",
        _BINDINGS,
    ),
    _of(
        "tensorrt",
        "ITimingCache, ITimingCache.combine, ITimingCache.serialize",
        "keeps the kernel chosen for a layer; without it each build chooses anew among near-ties, and kernels of fresh "
        "builds have other names",
        "NVIDIA, builder performance: kernels are chosen by timing; a recorded build, 3473 to 182 ms",
    ),
    _of(
        "tensorrt",
        "IBuilderConfig, IBuilderConfig.set_flag, IBuilderConfig.clear_flag, IBuilderConfig.set_memory_pool_limit, "
        "IBuilderConfig.create_timing_cache, IBuilderConfig.set_timing_cache, IBuilderConfig.get_timing_cache, "
        "IBuilderConfig.add_optimization_profile",
        "holds what is configured; refuses a timing cache that is damaged",
        _BINDINGS,
    ),
    _of(
        "tensorrt",
        "_get_route, _set_route, _ROUTES",
        "the build route is empty unless it is set; a route with an unknown knob or value is dropped without an error; "
        "all_build_routes is JSON of the knobs. 11 only",
        f"{_HEADER} (getBuildRoute, setBuildRoute, getAllBuildRoutes); {_PYCORE}: the setter drops the answer",
    ),
    _of(
        "tensorrt",
        "Builder, Builder.create_network, Builder.create_builder_config, Builder.create_optimization_profile, "
        "Builder.build_serialized_network, OnnxParser, OnnxParser.num_errors, OnnxParser.parse_from_file",
        "parses a file and builds a plan, or returns nothing and writes why to the log",
        _BINDINGS,
    ),
    _of(
        "tensorrt",
        "Runtime, Runtime.deserialize_cuda_engine",
        "returns nothing for a version-compatible plan unless engine_host_code_allowed is set, which is off by default",
        f"{_RUNTIME} (setEngineHostCodeAllowed: the default value is false); Polygraphy and trtexec set it",
    ),
    _of(
        "tensorrt",
        "ICudaEngine, ICudaEngine.num_io_tensors, "
        "ICudaEngine.num_layers, ICudaEngine.num_optimization_profiles, "
        "ICudaEngine.get_tensor_name, ICudaEngine.get_tensor_dtype, ICudaEngine.get_tensor_shape, "
        "ICudaEngine.get_tensor_mode, ICudaEngine.get_tensor_location, ICudaEngine.get_tensor_profile_shape, "
        "ICudaEngine.create_execution_context, ICudaEngine.create_engine_inspector",
        "answers for tensors by name; values are computed by ONNX Runtime, times by the simulated device",
        _BINDINGS,
    ),
    _of(
        "tensorrt",
        "IExecutionContext, IExecutionContext.set_optimization_profile_async, IExecutionContext.set_input_shape, "
        "IExecutionContext.set_tensor_address, IExecutionContext.set_output_allocator, IExecutionContext.infer_shapes, "
        "IExecutionContext.get_tensor_shape, IExecutionContext.execute_async_v3, IProfiler, "
        "IProfiler.report_layer_time, IOutputAllocator",
        "runs on a stream at one profile; the sum over layers is 20 % longer than a run",
        f"{_BINDINGS}; recorded profiles: 18 to 35 %",
    ),
    _of(
        "tensorrt",
        "EngineInspector, EngineInspector.get_engine_information",
        "layer information as JSON, names alone unless the profiling verbosity is detailed; I/O Tensors, Datatype and "
        "Format in 11",
        _SAMPLES,
    ),
    _of(
        "tensorrt",
        "IPluginRegistry, IPluginRegistry.load_library, get_plugin_registry",
        "loads a library, here a function of ONNX operators",
        _BINDINGS,
    ),
    _of("tensorrt", "init_libnvinfer_plugins", "takes a logger and a namespace", _BINDINGS),
    _of(
        "tensorrt",
        "fault out-of-memory, fault short-of-memory, fault slow-fp4",
        "the builder's messages where memory ends, kernels are dropped for want of it, or the GPU does not compute in "
        "FP4",
        "recorded messages, tests/data/tensorrt/samples/trtexec-messages.jsonl",
    ),
    _of(
        "tensorrt",
        "fault crash-in-run",
        "the process is killed by a signal while the engine runs",
        "the compiler of TensorRT for RTX 1.7.1.116 crashes so (tests/unit/backends/test_rtx_build.py)",
    ),
    _of(
        "tensorrt",
        "fault null-runtime, fault null-context, fault failed-run",
        "a call returns nothing or false, with or without a line in the log",
        "recorded, trt10.16-python-api-errors.log",
    ),
    _of(
        "tensorrt",
        "fault shapes-from-data",
        "the shape of an output is known only once it has run",
        f"{_RUNTIME} (IOutputAllocator)",
    ),
    _of(
        "cuda",
        "cudaError_t, cudaMemcpyKind, cudaStreamCaptureMode, cudaDeviceAttr, cudaComputeMode",
        "members and numbers that are used",
        _CUDA,
    ),
    _of(
        "cuda",
        "cudaGetErrorString, cudaGetLastError, cudaGetDeviceCount, cudaSetDevice, cudaGetDeviceProperties, "
        "cudaDriverGetVersion, cudaRuntimeGetVersion, cudaMemGetInfo, cudaDeviceGetAttribute, "
        "cudaStreamCreateWithFlags, cudaStreamSynchronize, cudaStreamDestroy, cudaStreamBeginCapture, "
        "cudaStreamEndCapture, cudaGraphInstantiate, cudaGraphDestroy, cudaGraphLaunch, cudaGraphExecDestroy, "
        "cudaEventCreate, cudaEventRecord, cudaEventElapsedTime, cudaEventDestroy, cudaMalloc, cudaMallocHost, "
        "cudaFree, cudaMemcpyAsync",
        "an error first, then the values",
        _CUDA,
    ),
    _of(
        "cuda",
        "cudaDeviceGetPCIBusId",
        "gives its whole buffer: the address, a null byte, spaces",
        "an H200 with cuda-bindings 13.3.1 (benchmarks/RESULTS.md)",
    ),
    _of(
        "cuda",
        "fault exclusive-process",
        "a second process gets cudaErrorDevicesUnavailable while a first one holds the GPU",
        "CUDA C++ Programming Guide, compute modes; CUDA Runtime API, cudaErrorDevicesUnavailable",
    ),
    _of(
        "cuda",
        "fault no-gpu, fault two-gpus, fault illegal-address, fault no-device-memory",
        "errors by CUDA's names, and a second GPU of another kind",
        _CUDA,
    ),
    _of(
        "cuda",
        "fault no-graph, fault no-graph-at-first",
        "a capture ends as invalidated: always, or the first one",
        "CUDA Runtime API, cudaErrorStreamCaptureInvalidated; trtexec falls back to single launches",
    ),
    _of(
        "cuda",
        "fault slow-launch",
        "a launch takes the host 2 ms",
        "samples/common/sampleReporting.cpp: enqueue time above 0.8 of compute time is warned of",
    ),
    _of(
        "GPU",
        "Gpu, Gpu.allocate, Gpu.free, Gpu.read, Gpu.write, Gpu.queue, Gpu.spend, Gpu.deliver, Gpu.held_alone, Stream, "
        "fault",
        "runs work when it is queued; time passes only while something runs",
        "our own clock and memory",
    ),
    _of(
        "trtexec",
        "banner, main, stage_of, refuse_unknown, fail",
        "banners with version and verdict, exit codes; refuses options that its version does not list",
        f"{_OPTIONS}; {_SAMPLES}",
    ),
    _of("trtexec", "profiles_of", "shapes stand directly behind each --profile", _OPTIONS),
    _of(
        "trtexec",
        "build",
        "takes 1 for a dynamic dimension without a shape, and reports it; times the engine in the same call",
        _SAMPLES,
    ),
    _of("trtexec", "layer_entry", "layer information of either major version", _SAMPLES),
    _of(
        "trtexec",
        "run, replay, write_outputs",
        "writes times, profiles and outputs; prints a recorded log",
        _SAMPLES,
    ),
    _of(
        "trtexec",
        "break_down",
        "crashes, hangs, ends without a verdict, or prints a recorded message and fails",
        "tests/data/tensorrt/samples/trtexec-messages.jsonl",
    ),
    _of(
        "nvidia-smi",
        "answering",
        "one row of values in the order of --query-gpu; code 2 and a message for a field that it does not know",
        "nvidia-smi --help-query-gpu; older drivers do not know clocks_event_reasons (R535)",
    ),
    _of(
        "nvidia-smi",
        "answering_for",
        "name, compute capability and driver by -i INDEX; code 6 for a GPU that is not there",
        "nvidia-smi, return codes: 6, a query to find an object was unsuccessful",
    ),
)


def defined(standin: str) -> set[str]:
    """Public classes, their public methods, and public functions of a stand-in's source."""
    found = set()
    for node in ast.parse(FILES[standin].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            methods = (part.name for part in node.body if isinstance(part, ast.FunctionDef))
            found.update(f"{node.name}.{name}" for name in methods if not name.startswith("_"))
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            found.add(node.name)
    return found


def planted(standin: str) -> set[str]:
    """The names of the faults that the source of a stand-in handles."""
    found = re.findall(r'fault\("([a-z0-9-]+)"\)', FILES[standin].read_text(encoding="utf-8"))
    return {f"fault {name}" for name in found}


def render() -> str:
    """The page of all behaviours."""
    lines = [
        "# Stand-ins",
        "",
        "Tests of the backends `tensorrt` and `trtexec` run without a GPU, on stand-ins (test doubles) under",
        "`tests/support`: those that run and time engines, or concern an option that TensorRT 10 and 11 alone have.",
        "What NVIDIA's parser and compiler do is tested with TensorRT for RTX, which needs no GPU",
        "(`tests/unit/backends/test_rtx_build.py`).",
        "This page lists the behaviours of the stand-ins, each with its source; one says where",
        "we observed a behaviour on a GPU. `tests/support/trt_on_gpu.py` runs the stand-in for TensorRT on a GPU.",
        "The page is generated from `tests/support/standins.py` by",
        "`pytest tests/unit/backends/test_standins.py --update-golden`. A test fails if a class, function or fault of",
        "a stand-in is not listed.",
    ]
    for standin, path in FILES.items():
        lines += ["", f"## {standin}", "", f"`{path.relative_to(SUPPORT.parents[1]).as_posix()}`", ""]
        lines += ["| what | does | source |", "|---|---|---|"]
        lines += [
            f"| {', '.join(f'`{name}`' for name in each.names)} | {each.does} | {each.source} |"
            for each in BEHAVIOURS
            if each.standin == standin
        ]
    return "\n".join(lines) + "\n"
