"""The options of a run, and the reading of their values, each with its origin.

An option is ``--qdq-x-y`` of pytest, ``--x-y`` of the command line, ``QDQSPEC_X_Y`` and a key of ``[tool.qdqspec]``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from qdqspec._core.config.declared import TEXT, check_option, require_plugins
from qdqspec._core.config.hooks import declared
from qdqspec._core.config.settings import ENVIRONMENT_PREFIX, NATIVE_CODE, Option, Settings
from qdqspec._core.registry import did_you_mean
from qdqspec.errors import ConfigError

OPTIONS: tuple[Option, ...] = (
    *(
        Option(name=each.name.replace("_", "-"), **each.metadata)
        for each in fields(Settings)
        if each.metadata
    ),
    *(
        Option(
            name=f"{backend}-{word}",
            sets=f"{backend}.{word}",
            type=TEXT,
            metavar=word.upper(),
            help=f"{text} On the command line only.",
            command_line=NATIVE_CODE,
        )
        for backend, words in declared("command_line", built_in=True).items()
        for word, text in words.items()
    ),
)
BY_KEY = {option.key: option for option in OPTIONS}
# How the backend builds, for each command that builds.
BUILD_OPTIONS = ("backend-option", "plugin", *(option.name for option in OPTIONS if option.sets))


def add_options(add: Callable[..., Any], *, prefix: str, only: Iterable[str] | None = None) -> None:
    """Add the options to a parser through its ``add_argument`` or ``addoption``; ``dest`` is ``qdq_<key>``."""
    for option in OPTIONS:
        if only is not None and option.name not in only:
            continue
        words: dict[str, Any] = {"dest": f"qdq_{option.key}", "default": None, "help": option.help}
        if option.kind == "switch":
            words["action"] = "store_true"
        else:
            words["metavar"] = option.metavar
            if option.kind == "many":
                words["action"] = "append"
        add(f"{prefix}{option.name}", **words)


def flags_given(values: Mapping[str, object]) -> dict[str, object]:
    """The options given on a command line, by key, from a namespace's values."""
    given = {option.key: values.get(f"qdq_{option.key}") for option in OPTIONS}
    return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value with its origin, as ``qdqspec config`` shows it."""

    name: str
    value: object
    origin: str


def load_settings(
    root: Path,
    *,
    flags: Mapping[str, object] | None = None,
    configured: Mapping[str, object] | None = None,
    prefix: str = "--qdq-",
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Settings:
    """Settings from flags, then environment, then ``pyproject.toml`` of ``root``, then defaults.

    ``flags`` holds unparsed values by key; ``configured`` those flags that a file gave, such as pytest's
    ``addopts``. Relative paths of flags and environment start at ``cwd`` (default: the current folder), the
    file's at ``root``. Raises `ConfigError` naming the place of an unknown key or an invalid value.
    """
    here, environ = cwd or Path.cwd(), os.environ if environ is None else environ
    layers = (
        _from_file(root / "pyproject.toml"),
        _from_environment(environ),
        [(key, value, f"{prefix}{BY_KEY[key].name} of addopts") for key, value in (configured or {}).items()],
        [(key, value, f"{prefix}{BY_KEY[key].name}") for key, value in (flags or {}).items()],
    )
    for key, _, origin in (entry for layer in layers[:-1] for entry in layer):
        if why := BY_KEY[key].command_line:
            cure = f"give {prefix}{BY_KEY[key].name} on the command line"
            raise ConfigError(f"{origin}: {why}", cure=cure)
    found: dict[str, Setting] = {}
    for number, (layer, base) in enumerate(zip(layers, (root, here, here, here), strict=True)):
        for key, value, origin in layer:
            found[key] = Setting(name=key, value=_parsed(BY_KEY[key], value, origin, base), origin=origin)
            if key == "backend_option":  # this imports the named backends
                for text in cast("tuple[str, ...]", found[key].value):
                    check_option(text, origin, command_line=number == len(layers) - 1, prefix=prefix)
    in_ci = environ.get("CI", "").lower() not in ("", "false")
    if in_ci:
        _refuse_update(found)
        found.setdefault("baseline", Setting(name="baseline", value="require", origin="CI"))
    given: dict[str, Any] = {key: found[key].value for key in found if not BY_KEY[key].sets}
    own = (f"{BY_KEY[key].sets}={found[key].value}" for key in found if BY_KEY[key].sets)
    given["backend_option"] = (*given.get("backend_option", ()), *own)
    origins = {key: setting.origin for key, setting in found.items()}
    settings = Settings(root=root, in_ci=in_ci, origins=origins, **given)
    if settings.plugin:
        require_plugins(settings.backend, origins["plugin"])
    return settings


def _refuse_update(found: Mapping[str, Setting]) -> None:
    """Reject ``--qdq-update`` in CI: a baseline written there would accept any regression."""
    allowed = "update_in_ci" in found and found["update_in_ci"].value is True
    if "update" in found and not allowed:
        raise ConfigError(
            f"{found['update'].origin}: baselines are not written in CI (the variable CI is set)",
            cure="write them on the same kind of machine and commit them, or add --qdq-update-in-ci",
        )


def list_settings(settings: Settings) -> tuple[Setting, ...]:
    """Each option with its value and origin, in the order of the table."""
    return tuple(
        Setting(
            name=option.name,
            value=settings.extra.get(option.sets, "") if option.sets else getattr(settings, option.key),
            origin=settings.origins.get(option.key, "default"),
        )
        for option in OPTIONS
    )


def find_root(start: Path) -> Path:
    """The nearest folder at or above ``start`` with a ``pyproject.toml`` or ``.git``; else ``start``."""
    start = start.absolute()
    for folder in (start, *start.parents):
        if (folder / "pyproject.toml").is_file() or (folder / ".git").exists():
            return folder
    return start


_Layer = list[tuple[str, object, str]]


def _from_environment(environ: Mapping[str, str]) -> _Layer:
    by_variable = {option.variable: option for option in OPTIONS}
    layer: _Layer = []
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name not in by_variable:
            near = did_you_mean(name, list(by_variable))
            raise ConfigError(
                f"unknown environment variable {name}{near}", cure="unset it, or correct its name"
            )
        option, value = by_variable[name], environ[name]
        layer.append((option.key, value.split(os.pathsep) if option.kind == "many" else value, name))
    return layer


def _from_file(path: Path) -> _Layer:
    layer: _Layer = []
    for name, value in _table(path).items():
        key = name.replace("-", "_")
        if key not in BY_KEY:
            known = [option.name for option in OPTIONS]
            what = f"[tool.qdqspec] has an unknown key '{name}'{did_you_mean(name, known)}"
            raise ConfigError(what, where=path, cure=f"known: {', '.join(known)}")
        layer.append((key, value, f"{path.name} [tool.qdqspec] {name}"))
    return layer


def _table(path: Path) -> dict[str, object]:
    """The table ``[tool.qdqspec]`` of a file; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        table: object = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not valid TOML: {error}", where=path, cure="correct the file") from None
    except RecursionError:  # of tomllib, for deeply nested brackets
        raise ConfigError("it nests too deep", where=path, cure="correct the file") from None
    except OSError as error:
        raise ConfigError(
            f"it cannot be read: {error.strerror}", where=path, cure="make it readable"
        ) from None
    for name in ("tool", "qdqspec"):
        table = table.get(name, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise ConfigError("[tool.qdqspec] must be a table", where=path, cure="write [tool.qdqspec] on a line")
    return table


def _parsed(option: Option, value: object, origin: str, base: Path) -> object:
    many = option.kind == "many"
    found = []
    for one in value if many and isinstance(value, list | tuple) else [value]:
        try:
            read = option.type.read(one)
        except ValueError as error:
            raise ConfigError(f"{origin}: '{one}' does not fit: {error}", cure=option.help) from None
        found.append(base / read if isinstance(read, Path) else read)
    return tuple(found) if many else found[0]
