"""A fake TensorRT that runs and times engines, with the API of the version of its ``dist-info``.

Enums have that version's members and numbers. Outputs are real, from ONNX Runtime; times come from the simulated
device's cost model; layer information has the schema of the major version. It parses and builds every model that ONNX
Runtime runs: what NVIDIA's parser and compiler refuse is tested with TensorRT for RTX. It fails as ``FAKE_TRT``
requests. With ``FAKE_TRT_GPU=real`` runs are enqueued on a GPU: see ``benchmarks/real_gpu.py``.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fake_gpu import fault
from onnx import TensorProto

from qdqspec.backends.fake.cost import Cost, cost_of
from qdqspec.graph.model import Model

if os.environ.get("FAKE_TRT_GPU") == "real":
    from real_gpu import gpu
else:
    from fake_gpu import gpu

__version__ = importlib.metadata.version("tensorrt")
_MAJOR = int(__version__.split(".")[0])
_DATA = Path(__file__).resolve().parents[3] / "data" / "tensorrt"
_API = json.loads((_DATA / "api" / f"{__version__}.json").read_text(encoding="utf-8"))


def _enum(name: str) -> Any:
    return enum.IntEnum(name.split(".")[-1], _API["enums"][name])


BuilderFlag = _enum("BuilderFlag")
DataType = _enum("DataType")
HardwareCompatibilityLevel = _enum("HardwareCompatibilityLevel")
LayerInformationFormat = _enum("LayerInformationFormat")
MemoryPoolType = _enum("MemoryPoolType")
NetworkDefinitionCreationFlag = _enum("NetworkDefinitionCreationFlag")
ProfilingVerbosity = _enum("ProfilingVerbosity")
TensorIOMode = _enum("TensorIOMode")
TensorLocation = _enum("TensorLocation")
TilingOptimizationLevel = _enum("TilingOptimizationLevel")

TIME = "standin.time"  # metadata of a model: a factor of the times of its layers
_TYPES = {
    TensorProto.FLOAT: "FLOAT",
    TensorProto.FLOAT16: "HALF",
    TensorProto.INT64: "INT64",
    TensorProto.INT32: "INT32",
    TensorProto.BOOL: "BOOL",
    TensorProto.INT8: "INT8",
    TensorProto.UINT8: "UINT8",
}


class ILogger:
    Severity = _enum("ILogger.Severity")

    def log(self, severity: Any, msg: str) -> None:
        raise NotImplementedError


class IHostMemory:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def __bytes__(self) -> bytes:
        return self._content

    @property
    def nbytes(self) -> int:
        return len(self._content)


# ---- building -----------------------------------------------------------------------------------


class ITensor:
    def __init__(self, value: onnx.ValueInfoProto) -> None:
        kind = value.type.tensor_type
        self.name = value.name
        self.dtype = DataType[_TYPES[kind.elem_type]]
        self.shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim)
        self.is_shape_tensor = False


class INetworkDefinition:
    def __init__(self, flags: int) -> None:
        self._strong = _MAJOR > 10 or bool(flags >> NetworkDefinitionCreationFlag.STRONGLY_TYPED & 1)
        self._model: onnx.ModelProto | None = None
        self._path: Path | None = None

    @property
    def _inputs(self) -> list[ITensor]:
        assert self._model is not None
        constants = {tensor.name for tensor in self._model.graph.initializer}
        return [ITensor(value) for value in self._model.graph.input if value.name not in constants]

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def get_input(self, index: int) -> ITensor:
        return self._inputs[index]


class IOptimizationProfile:
    def __init__(self) -> None:
        self._shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:  # noqa: A002 - TensorRT's names
        self._shapes[input] = [list(min), list(opt), list(max)]


class ITimingCache:
    def __init__(self, serialized: bytes) -> None:
        self._known: dict[str, float] = json.loads(serialized) if serialized else {}

    def combine(self, input_cache: ITimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self._known = input_cache._known | self._known
        return True

    def serialize(self) -> IHostMemory:
        return IHostMemory(json.dumps(self._known, sort_keys=True).encode())

    def _tactic(self, layer: str) -> float:
        """The time of the kernel selected for a layer relative to its cost: random, unless it is in the cache."""
        return self._known.setdefault(layer, math.exp(0.01 * random.gauss(0, 1)))


class IBuilderConfig:
    def __init__(self) -> None:
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY
        self.avg_timing_iterations = 1
        self.builder_optimization_level = 3
        self.max_num_tactics = -1
        self.max_aux_streams = 0
        self.tiling_optimization_level = TilingOptimizationLevel.NONE
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        self._route = ""
        self._flags = {BuilderFlag.TF32}
        self._pools: dict[Any, int] = {}
        self._cache: ITimingCache | None = None
        self._profiles: list[IOptimizationProfile] = []

    def set_flag(self, flag: Any) -> None:
        self._flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(flag)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self._pools[pool] = pool_size

    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None:
        try:
            return ITimingCache(serialized_timing_cache)
        except ValueError:
            _say("ERROR", "ITimingCache: Error Code 3: the serialized cache is damaged")
            return None

    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        self._cache = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._cache

    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1


def _get_route(config: IBuilderConfig) -> str:
    return config._route


def _set_route(config: IBuilderConfig, route: str) -> None:
    """Set a route; one with an unknown option or value is ignored, since the bindings drop the returned status."""
    allowed = {option["option"]: _values(option["allowed_values"]) for option in _ROUTES["tuner_options"]}
    parts = [token.partition("=") for token in route.split()]
    if all(value in allowed.get(name, ()) for name, _, value in parts):
        config._route = route


def _values(text: str) -> list[str]:
    return text.partition("=[")[2].rstrip("]").split("|")


_ROUTES: dict[str, Any] = {
    "tuner_version": "2.19.15",
    "tuner_options": [
        {"option": "-conv_use_long_w", "allowed_values": "-conv_use_long_w=[on|off]", "default_value": "on"},
        {
            "option": "-kgen:codegen:cuda_tile",
            "allowed_values": "-kgen:codegen:cuda_tile=[0|1|2|3]",
            "default_value": "1",
        },
    ],
}
if "build_route" in _API["classes"]["IBuilderConfig"]["properties"]:
    IBuilderConfig.build_route = property(_get_route, _set_route)  # type: ignore[attr-defined]
    IBuilderConfig.all_build_routes = property(lambda _: json.dumps(_ROUTES))  # type: ignore[attr-defined]


_logger: ILogger | None = None


def _say(severity: str, text: str) -> None:
    if _logger is not None:
        _logger.log(ILogger.Severity[severity], text)


class Builder:
    def __init__(self, logger: ILogger) -> None:
        global _logger
        _logger = logger

    def create_network(self, flags: int = 0) -> INetworkDefinition:
        return INetworkDefinition(flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> IHostMemory | None:
        assert network._strong, "a weakly typed network"
        if fault("out-of-memory"):
            _say("WARNING", "Skipping tactic 0x1 due to insufficient memory on size 123.")
            _say("ERROR", "[resizingAllocator.cpp::allocate::74] Error Code 1: Cuda Runtime (out of memory)")
            return None
        if fault("slow-fp4"):
            _say("WARNING", "FP4 Q/DQ layers, but the hardware does not accelerate FP4 compute.")
        if fault("short-of-memory"):
            _say("WARNING", "Skipping tactic 0x2 due to insufficient memory on size 456.")
        assert config.profiling_verbosity is ProfilingVerbosity.DETAILED, "layers would have names only"
        model = Model(network._model, path=network._path)
        cache = config._cache or ITimingCache(b"")
        factor = float({entry.key: entry.value for entry in model.proto.metadata_props}.get(TIME, 1))
        layers = [layer.name for layer in cost_of(model, 0).layers]
        plan = {
            "tactics": [
                {layer: cache._tactic(layer + _suffix(n)) * factor for layer in layers}
                for n in range(max(1, len(config._profiles)))
            ],
            "path": str(network._path),
            "profiles": [profile._shapes for profile in config._profiles],
            "host_code": BuilderFlag.VERSION_COMPATIBLE in config._flags,
        }
        return IHostMemory(json.dumps(plan).encode())


class OnnxParser:
    def __init__(self, network: INetworkDefinition, logger: ILogger) -> None:
        self._network = network

    @property
    def num_errors(self) -> int:
        return 0

    def parse_from_file(self, model: str) -> bool:
        try:
            self._network._model = onnx.load(model)
        except Exception:  # noqa: BLE001 - protobuf's own error types differ by version
            return False
        self._network._path = Path(model)
        return True


# ---- running ------------------------------------------------------------------------------------


class Runtime:
    def __init__(self, logger: ILogger) -> None:
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: IHostMemory) -> ICudaEngine | None:
        if fault("null-runtime"):
            _say("ERROR", "IRuntime::deserializeCudaEngine: Error Code 1: Serialization assertion failed")
            return None
        plan = json.loads(bytes(serialized_engine))
        if plan["host_code"] and not self.engine_host_code_allowed:
            return None
        return ICudaEngine(plan)


def _suffix(profile: int) -> str:
    """The suffix of layer names in the copies for a profile."""
    return f" [profile {profile}]" if profile else ""


def _with_tactics(cost: Cost, tactics: dict[str, float]) -> Cost:
    """The cost with the times of the kernels selected for the layers."""
    times = [layer.milliseconds * tactics[layer.name] for layer in cost.layers]
    layers = map(lambda layer, ms: dataclasses.replace(layer, milliseconds=ms), cost.layers, times)
    return dataclasses.replace(cost, layers=tuple(layers))


class ICudaEngine:
    def __init__(self, plan: dict[str, Any]) -> None:
        import onnxruntime as ort

        self._plan = plan
        self._model = Model(onnx.load(plan["path"]), path=Path(plan["path"]))
        settings = ort.SessionOptions()
        settings.log_severity_level = 4
        runnable: Any = plan["path"]
        if _plugins:
            proto = onnx.load(plan["path"])
            proto.functions.extend(_plugins.values())
            runnable = proto.SerializeToString()
        self._session = ort.InferenceSession(runnable, settings, providers=["CPUExecutionProvider"])
        cost = cost_of(self._model, 0, 0.05)
        self._costs = [_with_tactics(cost, tactics) for tactics in plan["tactics"]]
        self._cost = self._costs[0]
        graph = self._model.proto.graph
        constants = {tensor.name for tensor in graph.initializer}
        self._tensors = {v.name: ITensor(v) for v in (*graph.input, *graph.output) if v.name not in constants}
        for output in self._session.get_outputs():  # the session infers shapes that the file does not declare
            dims = (dim if isinstance(dim, int) else -1 for dim in output.shape)
            self._tensors[output.name].shape = tuple(dims)
        self._input_names = [v.name for v in graph.input if v.name not in constants]

    @property
    def num_io_tensors(self) -> int:
        return len(self._tensors)

    @property
    def num_layers(self) -> int:
        return len(self._cost.layers)

    @property
    def num_optimization_profiles(self) -> int:
        return max(1, len(self._plan["profiles"]))

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return self._tensors[name].dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def get_tensor_mode(self, name: str) -> Any:
        return TensorIOMode.INPUT if name in self._input_names else TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> Any:
        return TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        profiles = self._plan["profiles"]
        shapes = profiles[profile_index].get(name) if profiles else None
        return [tuple(shape) for shape in shapes or [self._tensors[name].shape] * 3]

    def create_execution_context(self) -> IExecutionContext | None:
        if fault("null-context"):
            _say("ERROR", "IExecutionContext: Error Code 2: OutOfMemory (Requested size was 123 bytes.)")
            return None
        return IExecutionContext(self)

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self._shapes = {name: engine.get_tensor_shape(name) for name in engine._input_names}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self._random = np.random.default_rng(7)
        self._profile = 0
        self.profiler: IProfiler | None = None
        self.nvtx_verbosity = ProfilingVerbosity.DETAILED

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._profile = profile_index
        return stream_handle in gpu.streams and profile_index < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: Any) -> bool:
        own = self._engine.get_tensor_shape(name)
        self._shapes[name] = tuple(shape)
        return len(own) == len(shape) and all(a in (-1, b) for a, b in zip(own, shape, strict=True))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return memory in gpu.blocks

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        self._allocators[name] = output_allocator
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name, shape in self._shapes.items() if -1 in shape]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        own = self._engine.get_tensor_shape(name)
        if -1 not in own or fault("shapes-from-data"):
            return own
        batches = {shape[0] for shape in self._shapes.values()}
        return (batches.pop(), *own[1:])

    def execute_async_v3(self, stream_handle: int) -> bool:
        if fault("failed-run"):
            _say("ERROR", "IExecutionContext::enqueueV3: Error Code 1: Cask (Cask convolution execution)")
            return False
        for name, allocator in self._allocators.items():
            self._fill_allocated(name, allocator, stream_handle)
        gpu.queue(stream_handle, self._run)
        return True

    def _run(self) -> None:
        for layer in self._engine._costs[self._profile].layers:
            noise = math.exp(0.01 * self._random.standard_normal()) if gpu.is_simulated else 1.0
            took = gpu.spend(layer.milliseconds * noise * self._grown(), timed=self.profiler is not None)
            if self.profiler is not None:
                self.profiler.report_layer_time(layer.name + _suffix(self._profile), took * 1.2)
        outputs = {name: at for name, at in self._addresses.items() if name not in self._shapes}
        gpu.deliver(outputs, self._values)

    def _grown(self) -> float:
        """The amount of computation relative to a batch of one."""
        return float(max((shape[0] for shape in self._shapes.values() if shape), default=1))

    def _values(self) -> dict[str, Any]:
        feeds = {}
        for name, shape in self._shapes.items():
            dtype = np.dtype({"FLOAT": "f4", "HALF": "f2", "INT64": "i8", "INT32": "i4"}[self._type(name)])
            feeds[name] = gpu.read(self._addresses[name], dtype, shape)
        outputs = [output.name for output in self._engine._session.get_outputs()]
        values = self._engine._session.run(outputs, feeds)
        return {name: np.ascontiguousarray(value) for name, value in zip(outputs, values, strict=True)}

    def _type(self, name: str) -> str:
        return str(self._engine.get_tensor_dtype(name).name)

    def _fill_allocated(self, name: str, allocator: Any, stream: int) -> None:
        value = self._values()[name]
        address = allocator.reallocate_output_async(name, 0, value.nbytes, 256, stream)
        allocator.notify_shape(name, value.shape)
        if address:
            gpu.write(address, value)


class IProfiler:
    def report_layer_time(self, layer_name: str, ms: float) -> None:
        raise NotImplementedError


class IOutputAllocator:
    pass


class EngineInspector:
    def __init__(self, engine: ICudaEngine) -> None:
        self._engine = engine
        self.execution_context: IExecutionContext | None = None

    def get_engine_information(self, format: Any) -> str:  # noqa: A002 - TensorRT's name
        assert format is LayerInformationFormat.JSON
        tactics = self._engine._plan["tactics"]
        layers: list[Any] = [
            _layer(layer, _suffix(n), tactics[n][layer.name])
            for n, cost in enumerate(self._engine._costs)
            for layer in cost.layers
        ]
        names = list(self._engine._tensors)
        if _MAJOR > 10:
            return json.dumps({"Layers": layers, "I/O Tensors": [{"Name": name} for name in names]})
        return json.dumps({"Layers": layers, "Bindings": names})


def _layer(layer: Any, suffix: str, tactic: float) -> dict[str, Any]:
    kind = "Int8" if layer.integer else "Float"
    typed = {"Datatype": kind, "Format": "Row major"} if _MAJOR > 10 else {"Format/Datatype": kind}
    return {
        "Name": layer.name + suffix,
        "LayerType": "Reformat" if layer.boundary else "CaskConvolution",
        **({"Origin": "QDQ"} if layer.boundary else {}),
        "Inputs": [{"Name": tensor, **typed} for tensor in layer.tensors or ("inside",)],
        "Outputs": [{"Name": tensor, **typed} for tensor in layer.tensors or ("inside",)],
        "TacticName": f"sm90_{'i8i8_i8i32_f32' if layer.integer else 'f32f32'}_t{round(tactic * 1e6)}",
        "Metadata": "\x1e".join(f"[ONNX Layer: {node}]" for node in layer.nodes),
    }


# ---- plugins ------------------------------------------------------------------------------------


class IPluginRegistry:
    def load_library(self, plugin_path: str) -> object | None:
        _, _, computes = Path(plugin_path).read_bytes().partition(b"\0getCreators\0")
        function = onnx.FunctionProto.FromString(computes)
        _plugins[function.name] = function
        return object()


_plugins: dict[str, onnx.FunctionProto] = {}  # the computations of plugins as functions of ONNX operators


def get_plugin_registry() -> IPluginRegistry:
    return IPluginRegistry()


def init_libnvinfer_plugins(logger: Any, namespace: str) -> bool:
    return isinstance(logger, ILogger) and namespace == ""
