"""The compiler of TensorRT for RTX: its options, ``tensorrt-rtx.WORD=VALUE``, and builds ahead of time, without a GPU.

One build is made for all requested compute capabilities; it takes as long as one. If it is refused, a build for each
shows which capabilities refuse the model. With detailed verbosity the compiler logs the list of the compiled
kernels; for several capabilities that is the list of the lowest one (measured with 1.7.1.116). The final machine code
is compiled on the GPU, so that a list shows which kernels run in which types, and no time. The command that repeats a
build makes Polygraphy load this file as a script.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qdqspec._core.options import ValueType, declare, option
from qdqspec._core.registry import did_you_mean
from qdqspec.backends._source import read_source
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.tensorrt.build import TimingOptions, open_network
from qdqspec.backends.tensorrt.log import Log, refusals
from qdqspec.errors import BackendError
from qdqspec.qdq.lint import named_node

if TYPE_CHECKING:
    import tensorrt as trt

    from qdqspec.graph import Model

# The compute capabilities that version 1.7 builds for ahead of time, as its API names them.
CAPABILITIES = ("SM75", "SM80", "SM86", "SM89", "SM120", "SM121")
DEFAULT = ("SM86", "SM89", "SM120")


def _capabilities(value: object) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(re.split(r"[,\s]+", str(value).strip().upper())))
    if unknown := [name for name in names if name not in CAPABILITIES]:
        near = did_you_mean(unknown[0], CAPABILITIES)
        raise ValueError(f"'{unknown[0]}' is none of {', '.join(CAPABILITIES)}{near}")
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class RtxOptions(TimingOptions):
    """Options of building and timing."""

    for_: tuple[str, ...] = option(
        ValueType(expects="compute capabilities, separated by commas", read=_capabilities),
        "GPUs that engines are built for, by compute capability. With it they do not run here.",
        (),
        shown=f"the GPU here; without one {','.join(DEFAULT)}",
    )


_NO_EFFECT = (
    "TensorRT for RTX accepts it without an effect (measured with 1.7.1.116)",
    "leave it out: its compiler chooses kernels without timing them",
)
_NOT_BUILT = (
    "TensorRT for RTX has no library for it (libnvinfer_lean), or ignores it (measured with 1.7.1.116)",
    "name the GPUs with tensorrt-rtx.for=SM86,SM89",
)
OPTIONS = declare(
    "tensorrt-rtx",
    RtxOptions,
    refused={
        **dict.fromkeys(
            (
                "opt-level", "workspace", "avg-timing", "max-tactics", "tiling", "tf32", "sparse", "timing-cache",
                "build-route", "aux-streams",
            ),
            _NO_EFFECT,
        ),
        **dict.fromkeys(("version-compatible", "hardware"), _NOT_BUILT),
    },
)  # fmt: skip


def compute_capability(name: str) -> tuple[int, int]:
    """``SM89`` as (8, 9), ``SM120`` as (12, 0)."""
    digits = name.removeprefix("SM")
    return int(digits[:-1]), int(digits[-1])


# ---- the command that repeats a build --------------------------------------------------------------

_FOR = "QDQSPEC_RTX_FOR"  # compute capabilities, separated by commas


def replay_command(model: Model, file: str, options: BuildOptions) -> str:  # noqa: ARG001 - its shapes are in the options
    """The shell command that builds ``file`` for the compute capabilities of a run, with its shapes and plugins."""
    words = OPTIONS.of(options.extra)
    variables = f"{_FOR}={','.join(words.for_ or DEFAULT)} POLYGRAPHY_USE_TENSORRT_RTX=1"
    arguments = ["polygraphy", "convert", file, "--convert-to", "trt", "-o", f"{file}.engine"]
    arguments += ["--trt-config-postprocess-script", f"{__file__}:set_capabilities"]
    for profile in options.profiles:
        for bound in ("min", "opt", "max") if profile.shapes else ():
            dims = ((name, map(str, getattr(shape, bound))) for name, shape in profile.shapes.items())
            arguments += [f"--trt-{bound}-shapes", *(f"{name}:[{','.join(sizes)}]" for name, sizes in dims)]
    arguments += ["--plugins", *map(str, words.plugins)] if words.plugins else []
    return f"{variables} {shlex.join(arguments)}"


def set_capabilities(builder: Any, network: Any, config: Any) -> None:  # noqa: ARG001 - what Polygraphy passes
    """Set the compute capabilities of a build configuration from the environment; Polygraphy calls it."""
    _build_for(config, os.environ[_FOR].split(","))


def _build_for(config: Any, names: Sequence[str]) -> None:
    import tensorrt_rtx as trt

    config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), index)


# ---- builds ----------------------------------------------------------------------------------------

_CANNOT_BUILD = "TensorRT for RTX could not build the model"
_READ_AS_INT8 = "Defaulting to INT8"  # of a warning; the values then differ from those that ONNX defines
_QUOTED = 2  # lines of the log in a refusal
CURRENT = "CURRENT"  # the GPU of this machine, in the API's names of compute capabilities


class Compiled(NamedTuple):
    """An engine for some compute capabilities, the list of its kernels as logged, and the facts of its build."""

    plan: trt.IHostMemory
    kernels: str
    facts: dict[str, Any]


def compile_model(model: Path, options: BuildOptions, log: Log, capabilities: Sequence[str]) -> Compiled:
    """Build a model for compute capabilities.

    Raises `BackendError` with the compiler's words, the node that they name, and the capabilities that refuse.
    """

    def built(names: Sequence[str]) -> Compiled | str:
        """The engine for all of these capabilities, or the compiler's reason for its refusal."""
        log.clear()
        _build_for(config, names)
        started = time.perf_counter()
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            return " | ".join(log.errors[-_QUOTED:]) or "the compiler gave no reason"
        facts = {
            "model": model.name,
            "for": list(names),
            "seconds": round(time.perf_counter() - started, 3),
            "plan_bytes": int(plan.nbytes),
            "warnings": list(log.warnings),
        }
        return Compiled(plan, log.kernels, facts)

    words = OPTIONS.of(options.extra)
    log.verbose = words.verbose
    with refusals(log, _CANNOT_BUILD, model):
        log.clear()
        builder, network, config = open_network(model, words.plugins, options.profiles, log)
        if any(_READ_AS_INT8 in warning for warning in log.warnings):
            raise BackendError(
                "TensorRT for RTX reads the model's uint8 as int8: values above 127 are clipped",
                where=model,
                cure="quantize to int8; `qdqspec lint --target tensorrt-rtx-1` names the pairs (TRT006)",
            )
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
