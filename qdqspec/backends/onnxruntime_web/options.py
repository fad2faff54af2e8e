"""The options of ONNX Runtime Web, ``onnxruntime-web.WORD=VALUE``."""

from __future__ import annotations

from collections.abc import Mapping

from qdqspec.config.declared import BackendOption, BackendOptions, one_of

LEVELS = {
    "all": "all",
    "extended": "extended",
    "basic": "basic",
    "off": "disabled",
}  # the package's own names

OPTIONS = BackendOptions(
    backend="onnxruntime-web",
    options=(
        BackendOption(
            word="optimization",
            type=one_of(*LEVELS),
            in_files=True,
            help="How far ONNX Runtime rewrites a model before it runs it.",
            default="all",
        ),
    ),
    refused={
        "browser": ("models run in Node only", "leave it out; Node and Chromium have the same engine, V8"),
    },
)


def level_from(extra: Mapping[str, str]) -> str:
    """The level of graph optimization in the package's words; raises `ConfigError` for an unknown value."""
    return LEVELS[str(OPTIONS.read(extra).get("optimization", "all"))]
