"""The backend `openvino`, and its engine.

``openvino`` is imported inside functions, so that importing this module is fast. The operator table and the choice of
formats hold for the CPU, where they were measured; no GPU or NPU has been available.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from qdqspec._core.arrays import Array
from qdqspec.backends import _cpu, _engine
from qdqspec.backends._source import read_given
from qdqspec.backends.base import PLAIN, Availability, BuildOptions, Capabilities
from qdqspec.backends.openvino import library
from qdqspec.backends.openvino.layers import find_origins, graph_hash, layer_times, named_nodes, read_kernels
from qdqspec.backends.openvino.ops import ABSORBED, LABELS, LINEAR
from qdqspec.errors import BackendUnavailableError
from qdqspec.types import DeviceKey, LayerTime, Samples

_refusals = _engine.refusals_of(library.plainly, library.cure_for)


class OpenVino:
    """OpenVINO with one stream, its arithmetic pinned: see `library.properties`."""

    name = "openvino"
    target = "openvino-cpu"
    options = library.OPTIONS

    def probe(self, options: BuildOptions = PLAIN) -> Availability:
        """Report whether OpenVINO can be imported and has the selected device."""
        cpu = _cpu.detect()
        path = cpu.int8_text(saturates=cpu.may_saturate)
        facts = {"cpu": cpu.product, "int8 path": path, "cores": str(cpu.cores)}
        try:
            openvino = library.import_openvino()
            core = openvino.Core()
            devices = list(core.available_devices)
            named = (f"{device}: {core.get_property(device, 'FULL_DEVICE_NAME')}" for device in devices)
            facts = {"openvino": str(openvino.__version__), "devices": "; ".join(named)} | facts
            wanted = library.device_name(options)
        except Exception as error:  # noqa: BLE001 - a broken plugin or driver raises anything
            why = error.what if isinstance(error, BackendUnavailableError) else library.plainly(error)
            return Availability(usable=False, why=why, install=library.INSTALL, facts=facts)
        if not any(device == wanted or device.startswith(f"{wanted}.") for device in devices):
            why = f"OpenVINO finds no device {wanted}: it has {', '.join(devices) or 'none'}"
            return Availability(usable=False, why=why, install="install the device's driver", facts=facts)
        return Availability(usable=True, facts=facts)

    def device(self, options: BuildOptions) -> DeviceKey:
        """Processor or other device, integer instruction set, OpenVINO major.minor and threads."""
        cpu, version, kind = (
            _cpu.detect(),
            library.installed_version(),
            library.OPTIONS.of(options.extra).device,
        )
        path = cpu.int8_text(saturates=cpu.may_saturate)
        details = cpu.details(int8_path=path, threads=options.threads, openvino=version)
        if kind == library.CPU:
            return DeviceKey(key=cpu.key("openvino", version, f"t{options.threads}"), details=details)
        product = _product(library.device_name(options))
        key = f"{_cpu.slug_from_text(f'{kind} {product}')}-openvino-{_cpu.major_minor(version)}"
        return DeviceKey(key=key, details={kind: product, **details})

    def capabilities(self, options: BuildOptions = PLAIN) -> Capabilities:
        """The operators that run in integers; the table is verified against the installed version by tests."""
        on_cpu = library.OPTIONS.of(options.extra).device == library.CPU
        return Capabilities(
            formats=("int8", "uint8"),
            labels=LABELS,
            activations={"int8": "uint8", "uint8": "uint8"},
            weights={"int8": "int8", "uint8": "int8"},
            absorbs=ABSORBED,
            constant_weight=frozenset(LINEAR),
            reduce_range=on_cpu and _cpu.detect().may_saturate,
            builds_side_by_side=on_cpu,
            one_processor=on_cpu,
            hardware=library.OPTIONS.of(options.extra).device,
        )

    def build(self, model: Path, options: BuildOptions) -> OpenVinoEngine:
        """Read and compile a model file; raise `BackendError` with OpenVINO's reason on one line."""
        return OpenVinoEngine(model, options)


class OpenVinoEngine(_engine.TimedEngine[Any, tuple[Any, dict[str, Array]]]):
    """A compiled model; a request and its inputs are bound. The model file must exist as long as `layers` is used."""

    def __init__(self, model: Path, options: BuildOptions) -> None:
        source = read_given(model)  # OpenVINO itself would try parsers of other formats too
        compiled = _compiled(model, options)
        super().__init__(model, compiled)
        self._options = options
        self._inputs, self._outputs = source.inputs, source.outputs
        with _refusals("OpenVINO could not build the model", model, cure=None):
            kernels = read_kernels(compiled.get_runtime_model())
            self.graph_hash = graph_hash(kernels, named_nodes(kernels, source))

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once and return the outputs by name."""
        compiled = self._require_open()
        with _refusals(_engine.cannot_run(feeds), self.model):
            request = _request(compiled, self._complete(feeds))
            request.infer(share_outputs=True)
            values = [np.array(request.get_output_tensor(i).data) for i in range(len(self._outputs))]
        return dict(zip(self._outputs, values, strict=True))

    def bind(self, feeds: Mapping[str, Array], profile: int = 0) -> None:
        """Fix the inputs that `time` and `layers` use; they are copied once."""
        compiled = self._require_open()
        with _refusals("the inputs could not be bound", self.model):
            values = self._complete(feeds)
            self._bind(profile, (_request(compiled, values), values))

    def _timed(self, runs: int, warmup: int, profile: int) -> Samples:
        run = partial(self._require_bound(profile)[0].infer, share_outputs=True)
        alone = self._options.threads == 1 and library.OPTIONS.of(self._options.extra).device == library.CPU
        with _refusals("the model could not be run", self.model):
            return _engine.time_runs(run, runs, warmup, alone=alone)

    def layers(self, runs: int = 12, profile: int = 0) -> tuple[LayerTime, ...]:
        """Time per kernel, from a second build with counters; its sum is scaled to the latency without them."""
        values = self._require_bound(profile)[1]
        profiled = _compiled(self.model, self._options, profile=True)
        with _refusals("the model could not be run", self.model):
            times = _kernel_times(_request(profiled, values), runs=runs, warmup=_engine.profile_warmup(runs))
            kernels = read_kernels(profiled.get_runtime_model())
        origins = find_origins(kernels, read_given(self.model))
        return layer_times(kernels, origins, times, self._latency_ms(runs, profile))

    def _complete(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Copies of the inputs in the model's order. Raises `BackendError` if their names are not the model's."""
        _engine.check_names(self._inputs, feeds, self.model)
        return {name: np.array(feeds[name], order="C") for name in self._inputs}


def _product(device: str) -> str:
    """The product name of a device, such as an Intel GPU."""
    with _refusals(f"OpenVINO cannot use device {device}", None, cure="see: qdqspec doctor"):
        return str(library.import_openvino().Core().get_property(device, "FULL_DEVICE_NAME"))


def _compiled(model: Path, options: BuildOptions, *, profile: bool = False) -> Any:
    core = library.core_with_extensions(options)
    with _refusals("OpenVINO could not build the model", model, cure=None):
        return core.compile_model(
            core.read_model(model), library.device_name(options), library.properties(options, profile=profile)
        )


def _request(compiled: Any, values: Mapping[str, Array]) -> Any:
    """An inference request with these inputs, which are in the model's order. Raises on other types and shapes."""
    tensor_of = library.import_openvino().Tensor
    request = compiled.create_infer_request()
    for index, value in enumerate(values.values()):
        request.set_input_tensor(index, tensor_of(value))
    return request


def _kernel_times(request: Any, *, runs: int, warmup: int) -> dict[str, float]:
    """Mean microseconds of each kernel by name, without the warm-up: counters are means since the build."""
    before = _counters(request, warmup)
    sums = {name: mean * (warmup + runs) for name, mean in _counters(request, runs).items()}
    return {name: max(0.0, (total - before.get(name, 0.0) * warmup) / runs) for name, total in sums.items()}


def _counters(request: Any, runs: int) -> dict[str, float]:
    for _ in range(runs):
        request.infer(share_outputs=True)
    return {info.node_name: info.real_time.total_seconds() * 1e6 for info in request.get_profiling_info()}


backend = OpenVino
