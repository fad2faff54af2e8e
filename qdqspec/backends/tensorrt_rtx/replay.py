"""The command that repeats a build with Polygraphy, and the script that it loads to select compute capabilities."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

from qdqspec.backends.base import BuildOptions
from qdqspec.backends.tensorrt_rtx.options import DEFAULT, OPTIONS
from qdqspec.types import ShapeProfile

if TYPE_CHECKING:
    from qdqspec.graph.model import Model

_FOR = "QDQSPEC_RTX_FOR"  # compute capabilities, separated by commas
_BOUNDS = ("min", "opt", "max")


def replay_command(model: Model, file: str, options: BuildOptions) -> str:  # noqa: ARG001 - its shapes are in the options
    """The shell command that builds ``file`` for the compute capabilities of a run, with its shapes and plugins."""
    words = OPTIONS.of(options.extra)
    variables = f"{_FOR}={','.join(words.for_ or DEFAULT)} POLYGRAPHY_USE_TENSORRT_RTX=1"
    arguments = ["polygraphy", "convert", file, "--convert-to", "trt", "-o", f"{file}.engine"]
    arguments += ["--trt-config-postprocess-script", f"{__file__}:set_capabilities"]
    for profile in options.profiles:
        arguments += _shape_words(profile)
    arguments += ["--plugins", *map(str, words.plugins)] if words.plugins else []
    return f"{variables} {shlex.join(arguments)}"


def _shape_words(profile: ShapeProfile) -> list[str]:
    found = []
    for bound in _BOUNDS if profile.shapes else ():
        dims = ((name, map(str, getattr(shape, bound))) for name, shape in profile.shapes.items())
        found += [f"--trt-{bound}-shapes", *(f"{name}:[{','.join(sizes)}]" for name, sizes in dims)]
    return found


def set_capabilities(builder: Any, network: Any, config: Any) -> None:  # noqa: ARG001 - what Polygraphy passes
    """Set the compute capabilities of a build configuration from the environment; Polygraphy calls it."""
    import tensorrt_rtx as trt

    names = os.environ[_FOR].split(",")
    config.num_compute_capabilities = len(names)
    for index, name in enumerate(names):
        config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
