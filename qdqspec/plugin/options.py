"""Options of the pytest plugin, and the settings they come to. Imports pytest and the standard library only."""

from __future__ import annotations

import pytest

from qdqspec.config import Settings, add_options, flags_given, load_settings
from qdqspec.errors import ConfigError

_SETTINGS = pytest.StashKey[Settings]()

MARKERS = (
    'qdq("file::case"): judges a quantized model; on a plain test, the case its qdq_* fixtures are about',
    "tune: may start a search for the best placement, which takes minutes",
    "gpu: needs a GPU",
    "slow: takes long",
)


def add_to(parser: pytest.Parser) -> None:
    """Add ``--qdq-*``."""
    group = parser.getgroup("qdqspec", "quantized models (qdqspec)")
    add_options(group.addoption, prefix="--qdq-")


def register_markers(config: pytest.Config) -> None:
    """Make the markers known to ``--strict-markers``."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def asked_for(config: pytest.Config) -> bool:
    """Whether any ``--qdq-*`` option was given."""
    return bool(flags_given(vars(config.option)))


def settings_of(config: pytest.Config) -> Settings:
    """The settings of this run. Reads environment and ``pyproject.toml`` on first use; may raise `ConfigError`."""
    if _SETTINGS not in config.stash:
        config.stash[_SETTINGS] = load_settings(
            config.rootpath, flags=flags_given(vars(config.option)), cwd=config.invocation_params.dir
        )
    return config.stash[_SETTINGS]


def refuse_wrong_options(config: pytest.Config) -> None:
    """Stop before anything is collected where a ``--qdq-*`` option has a value that does not fit."""
    if not asked_for(config):
        return
    try:
        settings = settings_of(config)
        if settings.report:
            from qdqspec.plugin.distribute import refuse_unknown_formats

            refuse_unknown_formats(settings.report)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None
