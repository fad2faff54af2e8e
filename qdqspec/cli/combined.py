"""Options of ``tune`` that set a key of a spec in another form, such as shapes one bound at a time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qdqspec.cli.words import shapes
from qdqspec.config import hooks
from qdqspec.errors import ConfigError

_BOUNDS = ("min", "opt", "max")
# The option that set a word of `qdqspec.tune`, for messages.
FLAGS: Mapping[str, str] = {
    "graph": "--graph-json",
    "regions": "--graph-json",
    "shapes": "--min-shapes, --opt-shapes, --max-shapes",
}


def add_combined(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for bound in _BOUNDS:
        parser.add_argument(
            f"--{bound}-shapes",
            type=shapes,
            metavar="NAME:1x3x224x224",
            help={
                "min": "Smallest shapes of inputs whose dimensions are dynamic (default: --opt-shapes).",
                "opt": "The shapes that are measured, in place of --shapes.",
                "max": "Largest shapes (default: --opt-shapes).",
            }[bound],
        )
    parser.add_argument(
        "--pattern-cache",
        action="append",
        metavar="FILE",
        help="The patterns.yaml of an earlier run, as --start-from takes it. Repeatable.",
    )
    parser.add_argument(
        "--graph-json",
        metavar="FILE",
        help="Layer information that a tool of the runtime exported: regions follow the kernels of the engine.",
    )


def combined_words(arguments: argparse.Namespace) -> dict[str, Any]:
    """The words of `qdqspec.tune` that these options give. Raises `ConfigError` if they contradict others."""
    words: dict[str, Any] = {}
    given = {bound: getattr(arguments, f"{bound}_shapes") for bound in _BOUNDS}
    if any(given.values()):
        words["shapes"] = _spans(given, arguments)
    if arguments.pattern_cache:
        words["start_from"] = [*(arguments.start_from or ()), *arguments.pattern_cache]
    if arguments.graph_json:
        if Path(arguments.graph_json).suffix == ".onnx":
            tools = ", ".join(hooks.declared("exported_by").values())
            raise ConfigError("--graph-json is a model", cure=f"name what {tools} wrote")
        words |= {"regions": "fusion", "graph": arguments.graph_json}
    return words


def _spans(given: Mapping[str, dict[str, list[int]] | None], arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.shapes is not None:
        raise ConfigError(
            "--shapes and --min-shapes, --opt-shapes or --max-shapes are both given",
            cure="--shapes is for one shape, the others for a range",
        )
    usual = given["opt"]
    if usual is None:
        raise ConfigError("--opt-shapes is missing: the shapes that are measured", cure="add it")
    for bound in ("min", "max"):
        for name in given[bound] or ():
            if name not in usual:
                raise ConfigError(
                    f"--{bound}-shapes names '{name}', and --opt-shapes does not", cure="add it there"
                )
    return {
        name: {bound: (given[bound] or {}).get(name, dims) for bound in _BOUNDS}
        for name, dims in usual.items()
    }
