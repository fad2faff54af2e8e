"""Builds an engine ahead of time with the compiler of TensorRT for RTX, without a GPU.

One build is made for all requested compute capabilities; it takes as long as one. If it is refused, a build for each
shows which capabilities refuse the model. With detailed verbosity the compiler logs the list of the compiled
kernels; for several capabilities that is the list of the lowest one (measured with 1.7.1.116). The final machine code
is compiled on the GPU, so that a list shows which kernels run in which types, and no time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec.backends._source import read_source
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.tensorrt.api import network_flags
from qdqspec.backends.tensorrt.build import add_profiles, load_plugins, parse
from qdqspec.backends.tensorrt.log import Log, refusals
from qdqspec.backends.tensorrt_rtx.options import RtxOptions
from qdqspec.backends.tensorrt_rtx.replay import replay_command
from qdqspec.errors import BackendError
from qdqspec.graph.model import Model

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

    with refusals(log, _CANNOT_BUILD, model):
        builder = trt.Builder(logger)
        load_plugins(words.plugins, model, log, logger)
        network = builder.create_network(network_flags())
        config = builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # else no kernels are listed
        parse(network, model, log, logger)
        add_profiles(builder, network, config, options.profiles, model)
        return _Compiler(builder, network, config, model, log, options).compiled(capabilities)


@dataclass(frozen=True)
class _Compiler:
    """The builds of one parsed network."""

    builder: trt.Builder
    network: trt.INetworkDefinition
    config: trt.IBuilderConfig
    model: Path
    log: Log
    options: BuildOptions

    @cached_property
    def source(self) -> Model:
        """The model as given."""
        return read_source(self.model)

    def compiled(self, capabilities: Sequence[str]) -> Compiled:
        whole = self._built(capabilities)
        if isinstance(whole, Compiled):
            return whole
        alone = {name: self._built([name]) for name in capabilities} if len(capabilities) > 1 else {}
        refused = {name: text for name, text in alone.items() if isinstance(text, str)}
        repeat = replay_command(self.source, str(self.model), self.options)
        cure = "leave the named node in float, or leave the capability out of tensorrt-rtx.for; to repeat: "
        what = self._refusal(refused or {", ".join(capabilities): whole})
        raise BackendError(what, where=self.model, cure=cure + repeat)

    def _built(self, capabilities: Sequence[str]) -> Compiled | str:
        """The engine for all of these capabilities, or the compiler's reason for its refusal."""
        import tensorrt as trt

        self.log.clear()
        known: Any = trt.ComputeCapability
        self.config.num_compute_capabilities = len(capabilities)
        for index, name in enumerate(capabilities):
            self.config.set_compute_capability(getattr(known, name), index)
        started = time.perf_counter()
        plan = self.builder.build_serialized_network(self.network, self.config)
        if plan is None:
            return " | ".join(self.log.errors[-_QUOTED:]) or "the compiler gave no reason"
        seconds = round(time.perf_counter() - started, 3)
        return Compiled(plan=plan, kernels=self.log.kernels, warnings=self.log.warnings, seconds=seconds)

    def _refusal(self, refused: dict[str, str]) -> str:
        """The text of a refusal: capabilities with one reason are named together, with the node if it is known."""
        names: dict[str, list[str]] = {}
        for capability, text in refused.items():
            names.setdefault(text, []).append(capability)
        reasons = []
        for text, capabilities in names.items():
            node = next(named_nodes(text, self.source), "")
            at = f" at node '{node}'" if node else ""
            reasons.append(f"for {', '.join(capabilities)}{at}: {text}")
        return f"TensorRT for RTX refuses the model {' ; '.join(reasons)}"


# Where the compiler refers to a name: 'x', constant (x), tensor x.
_POINTED = re.compile(
    r"'([^']+)'|\b(?:constant|layer|node|operation|tensor) \(?([^\s(),']+?)\.?(?=[\s(),']|$)"
)
_SEPARATORS = re.compile(r"\.?[\s'\"()\[\],;:=]+")
# What the compiler adds to names of tensors and layers: x.1, x_myl0_3.
_ADDED = re.compile(r"(\.\d+)?(_myl\d+(_\d+)?)?$")


def named_nodes(text: str, model: Model) -> Iterator[str]:
    """The nodes of a model that a text of the compiler names, directly or by a tensor that they make or read.

    A name of letters and digits only may be a word or a line number of the text as well: it counts where the text
    refers to a name.
    """
    pointed = {name for match in _POINTED.finditer(text) for name in match.groups()}
    for word in dict.fromkeys(_SEPARATORS.split(text.rstrip("."))):
        for name in (word, _ADDED.sub("", word)):
            if name.isalnum() and word not in pointed and "_myl" not in word:
                continue
            if name in model.by_name:
                yield name
            elif name in model.producer:
                yield model.producer[name].name
            elif readers := model.consumers.get(name, ()):
                yield readers[0].node
            else:
                continue
            break
