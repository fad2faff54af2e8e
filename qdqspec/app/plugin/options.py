"""Options of the pytest plugin, and the settings made from them. Imports pytest and the standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, takewhile

import pytest

from qdqspec._core.config import OPTIONS, Settings, flags_given, load_settings
from qdqspec._core.registry import did_you_mean
from qdqspec.app.plugin._compat import is_worker
from qdqspec.errors import ConfigError

# Options that may load native code or name a scheduler.
_GUARDED = [option for option in OPTIONS if option.command_line or option.name == "backend-option"]
_SETTINGS = pytest.StashKey[Settings]()


def refuse_unknown_options(words: Sequence[str]) -> None:
    """Raise `pytest.UsageError` for a ``--qdq-*`` option that does not exist, naming the closest one."""
    known = [f"--qdq-{option.name}" for option in OPTIONS]
    given = [word.partition("=")[0] for word in takewhile(lambda word: word != "--", words)]
    unknown = [name for name in given if name.startswith("--qdq-") and name not in known]
    if unknown:
        problems = "; ".join(f"unknown option '{name}'{did_you_mean(name, known)}" for name in unknown)
        raise pytest.UsageError(f"{problems}\n  all options: pytest --help, group qdqspec")


def asked_for(config: pytest.Config) -> bool:
    """Whether any ``--qdq-*`` option was given."""
    return bool(flags_given(vars(config.option)))


def settings_of(config: pytest.Config) -> Settings:
    """The settings of this run. Reads environment and ``pyproject.toml`` on first use; may raise `ConfigError`."""
    if _SETTINGS not in config.stash:
        flags, configured = _by_origin(config)
        config.stash[_SETTINGS] = load_settings(
            config.rootpath, flags=flags, configured=configured, cwd=config.invocation_params.dir
        )
    return config.stash[_SETTINGS]


def _by_origin(config: pytest.Config) -> tuple[dict[str, object], dict[str, object]]:
    """The options of the command line, and the options of ``addopts`` that can load native code.

    In a worker of pytest-xdist all come from the controller, which has checked them.
    """
    flags, configured = flags_given(vars(config.option)), {}
    words = [*map(str, config.invocation_params.args)]
    for guarded in _GUARDED if not is_worker(config) else ():
        key, option, values = guarded.key, f"--qdq-{guarded.name}", flags.get(guarded.key)
        written: set[object] = {
            word.removeprefix(f"{option}=") for word in words if word.startswith(f"{option}=")
        }
        written |= {value for word, value in pairwise(words) if word == option}
        if values is not None and not written.issuperset(values if isinstance(values, list) else [values]):
            configured[key] = flags.pop(key)
    return flags, configured


def refuse_wrong_options(config: pytest.Config) -> None:
    """Reject a ``--qdq-*`` option with an invalid value before collection."""
    if not asked_for(config):
        return
    try:
        settings = settings_of(config)
        if settings.report:
            from qdqspec.app.report.write import refuse_unknown_formats

            refuse_unknown_formats(settings.report)
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from None
