"""The options of ONNX Runtime Web, ``onnxruntime-web.WORD=VALUE``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qdqspec.config.declared import declare, option
from qdqspec.config.values import one_of

LEVELS = {
    "all": "all",
    "extended": "extended",
    "basic": "basic",
    "off": "disabled",
}  # the package's own names

NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxRuntimeWebOptions:
    """The options after ``onnxruntime-web.`` in the configuration."""

    optimization: str = option(
        one_of(*LEVELS), "How far ONNX Runtime rewrites a model before it runs it.", "all"
    )
    browser: str = option(
        one_of(NONE, "chromium"),
        "The browser that runs the models, without a window; none: Node runs them.",
        NONE,
    )


OPTIONS = declare("onnxruntime-web", OnnxRuntimeWebOptions)


def options_from(extra: Mapping[str, str]) -> OnnxRuntimeWebOptions:
    """Read the options that begin with ``onnxruntime-web.``; raise `ConfigError` for an unknown or invalid one."""
    return OnnxRuntimeWebOptions(**OPTIONS.read(extra))


def wants_browser(extra: Mapping[str, str]) -> bool:
    """Whether models run in a browser."""
    return options_from(extra).browser != NONE
