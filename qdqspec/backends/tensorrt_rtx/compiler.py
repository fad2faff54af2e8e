"""Builds an engine ahead of time with the compiler of TensorRT for RTX, without a GPU.

One build is made for all requested compute capabilities; it takes as long as one. If it is refused, a build for each
shows which capabilities refuse the model. With detailed verbosity the compiler logs the list of the compiled
kernels; for several capabilities that is the list of the lowest one (measured with 1.7.1.116). The final machine code
is compiled on the GPU, so that a list shows which kernels run in which types, and no time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec.backends._source import read_source
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.tensorrt.build import open_network
from qdqspec.backends.tensorrt.log import Log, refusals
from qdqspec.backends.tensorrt_rtx.options import RtxOptions
from qdqspec.backends.tensorrt_rtx.replay import replay_command
from qdqspec.errors import BackendError
from qdqspec.qdq.lint.rules import named_node

if TYPE_CHECKING:
    import tensorrt as trt

_CANNOT_BUILD = "TensorRT for RTX could not build the model"
_QUOTED = 2  # lines of the log in a refusal
CURRENT = "CURRENT"  # the GPU of this machine, in the API's names of compute capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """An engine for some compute capabilities: ``kernels`` is the list of the compiled kernels, as logged."""

    plan: trt.IHostMemory
    kernels: str
    warnings: tuple[str, ...]
    seconds: float


def compile_model(
    model: Path,
    words: RtxOptions,
    options: BuildOptions,
    log: Log,
    logger: trt.ILogger,
    capabilities: Sequence[str],
) -> Compiled:
    """Build a model for compute capabilities.

    Raises `BackendError` with the compiler's words, the node that they name, and the capabilities that refuse.
    """
    import tensorrt as trt

    def built(names: Sequence[str]) -> Compiled | str:
        """The engine for all of these capabilities, or the compiler's reason for its refusal."""
        log.clear()
        known: Any = trt.ComputeCapability
        config.num_compute_capabilities = len(names)
        for index, name in enumerate(names):
            config.set_compute_capability(getattr(known, name), index)
        started = time.perf_counter()
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            return " | ".join(log.errors[-_QUOTED:]) or "the compiler gave no reason"
        seconds = round(time.perf_counter() - started, 3)
        return Compiled(plan=plan, kernels=log.kernels, warnings=log.warnings, seconds=seconds)

    with refusals(log, _CANNOT_BUILD, model):
        builder, network, config = open_network(model, words.plugins, options.profiles, log, logger)
        whole = built(capabilities)
        if isinstance(whole, Compiled):
            return whole
        alone = {name: built([name]) for name in capabilities} if len(capabilities) > 1 else {}
    refused = {name: text for name, text in alone.items() if isinstance(text, str)}
    source = read_source(model)
    refusing: dict[str, list[str]] = {}  # capabilities by reason
    for name, text in (refused or {", ".join(capabilities): whole}).items():
        refusing.setdefault(text, []).append(name)
    reasons = []
    for text, names in refusing.items():
        node = named_node(source, text)
        at = f" at node '{node}'" if node else ""
        reasons.append(f"for {', '.join(names)}{at}: {text}")
    cure = "leave the named node in float, or leave the capability out of tensorrt-rtx.for; to repeat: "
    raise BackendError(
        f"TensorRT for RTX refuses the model {' ; '.join(reasons)}",
        where=model,
        cure=cure + replay_command(source, str(model), options),
    )
