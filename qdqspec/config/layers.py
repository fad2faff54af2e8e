"""Settings from flags, environment and ``[tool.qdqspec]``, each value with its origin."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qdqspec.config.declared import NATIVE_CODE, REMOTE_CODE, check_option, require_plugins
from qdqspec.config.settings import BY_KEY, COMMAND_LINE, ENVIRONMENT_PREFIX, OPTIONS, Option, Settings
from qdqspec.errors import ConfigError
from qdqspec.registry import did_you_mean


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
    layout: Literal["spec/case", "case", ""] = "spec/case",
) -> Settings:
    """Settings from flags, then environment, then ``pyproject.toml`` of ``root``, then defaults.

    ``flags`` holds unparsed values by key; ``configured`` those flags that a file gave, such as pytest's
    ``addopts``. Relative paths of flags and environment start at ``cwd`` (default: the current folder), the
    file's at ``root``. Raises `ConfigError` naming the place of an unknown key or an invalid value.
    """
    here = cwd or Path.cwd()
    layers = (
        _from_file(root / "pyproject.toml"),
        _from_environment(os.environ if environ is None else environ),
        [(key, value, f"{prefix}{BY_KEY[key].name} of addopts") for key, value in (configured or {}).items()],
        [(key, value, f"{prefix}{BY_KEY[key].name}") for key, value in (flags or {}).items()],
    )
    _refuse_native_code((entry for layer in layers[:-1] for entry in layer), prefix)
    found: dict[str, Setting] = {}
    for number, (layer, base) in enumerate(zip(layers, (root, here, here, here), strict=True)):
        for key, value, origin in layer:
            found[key] = Setting(name=key, value=_parsed(BY_KEY[key], value, origin, base), origin=origin)
            if key == "backend_option":
                _check_backend_options(found[key], prefix, command_line=number == len(layers) - 1)
    in_ci = (os.environ if environ is None else environ).get("CI", "").lower() not in ("", "false")
    if in_ci:
        _refuse_update(found)
        found.setdefault("baseline", Setting(name="baseline", value="require", origin="CI"))
    given: dict[str, Any] = {key: found[key].value for key in found if not BY_KEY[key].sets}
    own = (
        f"{option.sets}={found[option.key].value}"
        for option in OPTIONS
        if option.sets and option.key in found
    )
    given["backend_option"] = (*given.get("backend_option", ()), *own)
    origins = {key: setting.origin for key, setting in found.items()}
    settings = Settings(root=root, layout=layout, in_ci=in_ci, origins=origins, **given)
    if settings.plugin:
        require_plugins(settings.backend, origins["plugin"])
    return settings


def _refuse_native_code(quiet: Iterable[tuple[str, object, str]], prefix: str) -> None:
    """Reject native code from files and variables, which may come with a repository."""
    for key, _, origin in quiet:
        if key in COMMAND_LINE:
            raise ConfigError(
                f"{origin}: {REMOTE_CODE if key.startswith('cluster') else NATIVE_CODE}",
                cure=f"give {prefix}{BY_KEY[key].name} on the command line",
            )


def _check_backend_options(given: Setting, prefix: str, *, command_line: bool) -> None:
    """Check each option against the backend's declaration. Imports the named backends."""
    assert isinstance(given.value, tuple)
    for text in given.value:
        check_option(text, given.origin, command_line=command_line, prefix=prefix)


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
        option = by_variable[name]
        many = option.kind == "many"
        layer.append((option.key, environ[name].split(os.pathsep) if many else environ[name], name))
    return layer


def _from_file(path: Path) -> _Layer:
    layer: _Layer = []
    for name, value in _table(path).items():
        key = name.replace("-", "_")
        if key not in BY_KEY:
            known = [option.name for option in OPTIONS]
            near = did_you_mean(name, known)
            raise ConfigError(
                f"[tool.qdqspec] has an unknown key '{name}'{near}",
                where=path,
                cure=f"known: {', '.join(known)}",
            )
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
    if option.kind != "many":
        return _parsed_one(option, value, origin, base)
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(_parsed_one(option, one, origin, base) for one in values)


def _parsed_one(option: Option, value: object, origin: str, base: Path) -> object:
    try:
        return _based(option.type.read(value), base)
    except ValueError as error:
        raise ConfigError(f"{origin}: '{value}' does not fit: {error}", cure=option.help) from None


def _based(value: object, base: Path) -> object:
    return base / value if isinstance(value, Path) else value
