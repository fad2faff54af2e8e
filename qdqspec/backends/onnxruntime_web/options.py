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

NONE = "none"

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
        BackendOption(
            word="browser",
            type=one_of(NONE, "chromium"),
            in_files=True,
            help="The browser that runs the models, without a window; none: Node runs them.",
            default=NONE,
        ),
    ),
)


def level_from(extra: Mapping[str, str]) -> str:
    """The level of graph optimization in the package's words; raises `ConfigError` for an unknown value."""
    return LEVELS[str(OPTIONS.read(extra).get("optimization", "all"))]


def wants_browser(extra: Mapping[str, str]) -> bool:
    """Whether models run in a browser."""
    return bool(OPTIONS.read(extra).get("browser", NONE) != NONE)
