"""Where and how a run happens: options, environment, ``[tool.qdqspec]``, defaults, in this order.

`OPTIONS` is the one table behind ``--qdq-x-y`` of pytest, ``--x-y`` of the command line,
``QDQSPEC_X_Y`` and the keys of ``[tool.qdqspec]``. Floor 0 only. What must
hold of a model is never said here: that is the spec's business.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from qdqspec import values
from qdqspec.errors import ConfigError
from qdqspec.registry import did_you_mean
from qdqspec.types import Case

Mode = Literal["run", "measure", "verify", "plan"]
BaselinePolicy = Literal["require", "warn", "off"]
Update = Literal["new", "changed", "all"]

ENVIRONMENT_PREFIX = "QDQSPEC_"
MODES: tuple[Mode, ...] = ("run", "measure", "verify", "plan")
REQUIREMENTS = ("device", "conclusive")
BASELINE_POLICIES: tuple[BaselinePolicy, ...] = ("require", "warn", "off")
UPDATES: tuple[Update, ...] = ("new", "changed", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of a run. Relative paths are taken from ``root``.

    ``time_limit`` is in seconds. ``require`` turns skips into failures: ``device`` those for a missing
    backend, ``conclusive`` those for an undecided measurement. ``baseline`` says what becomes of a missing
    baseline. ``origins`` tells for each option that was given where it came from; ``layout`` is how `folder`
    divides ``output``.
    """

    root: Path = field(default_factory=Path.cwd)
    backend: str = "onnxruntime"
    mode: Mode = "run"
    cache_dir: Path = Path(".qdqspec/cache")
    no_cache: bool = False
    seed: int = 0
    threads: int = 1
    time_limit: float | None = None
    require: tuple[str, ...] = ()
    scheme: str | None = None
    output: Path = Path("reports")
    report: tuple[Path, ...] = ()
    json: Path | None = None
    allow_path: tuple[Path, ...] = ()
    baseline: BaselinePolicy = "warn"
    update: Update | None = None
    update_in_ci: bool = False
    backend_option: tuple[str, ...] = ()
    plugin: tuple[Path, ...] = ()
    trtexec_args: str = ""
    layout: Literal["spec/case", "case", ""] = "spec/case"
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("cache_dir", "output"):
            object.__setattr__(self, name, self.root / getattr(self, name))

    @property
    def extra(self) -> dict[str, str]:
        """The words for backends: the options given as such, and those that have a flag of their own."""
        words = dict(option.split("=", 1) for option in self.backend_option)
        own = {"tensorrt.plugins": os.pathsep.join(map(str, self.plugin)), "trtexec.args": self.trtexec_args}
        return words | {word: text for word, text in own.items() if text}

    def folder(self, case: Case) -> Path:
        """Where the files of a case go: ``output/<spec>/<case>``, or as ``layout`` says."""
        levels = {"spec/case": (case.spec_name, case.id), "case": (case.id,), "": ()}[self.layout]
        return self.output.joinpath(*levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value with its origin, as ``qdqspec config`` shows it."""

    name: str
    value: object
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: ``parse`` makes a value of what was written, or raises ``ValueError`` saying what fits.

    ``kind`` is ``one`` value, ``many`` (repeatable) or a ``switch``.
    """

    name: str  # with dashes
    parse: Callable[[object], Any]
    help: str
    metavar: str = ""
    kind: Literal["one", "many", "switch"] = "one"

    @property
    def key(self) -> str:
        """The field of `Settings`, and the key in TOML."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.key.upper()


OPTIONS: tuple[Option, ...] = (
    Option(
        name="backend",
        parse=values.backend,
        metavar="NAME",
        help="Who runs the models (default: onnxruntime).",
    ),
    Option(
        name="mode",
        parse=values.one_of(MODES),
        metavar="MODE",
        help="run: tune unless a cached winner still verifies; measure: time the known winner anew; "
        "verify: only what needs no timing; plan: list candidates and cost, build nothing (default: run).",
    ),
    Option(
        name="cache-dir",
        parse=values.path,
        metavar="DIR",
        help="What was measured (default: .qdqspec/cache).",
    ),
    Option(name="no-cache", parse=values.switch, kind="switch", help="Neither read nor write the cache."),
    Option(
        name="seed", parse=values.whole(0), metavar="N", help="Seed of search and random inputs (default: 0)."
    ),
    Option(
        name="threads", parse=values.whole(1), metavar="N", help="Threads a model runs with (default: 1)."
    ),
    Option(
        name="time-limit",
        parse=values.duration,
        metavar="TIME",
        help="Time for the whole run, such as 20m; what is not decided by then is inconclusive.",
    ),
    Option(
        name="require",
        parse=values.one_of(REQUIREMENTS),
        metavar="WHAT",
        kind="many",
        help="device: a missing backend fails instead of skipping; conclusive: so does an undecided "
        "measurement. Repeatable.",
    ),
    Option(name="scheme", parse=values.word, metavar="DIGEST", help="Judge this known placement; no search."),
    Option(name="output", parse=values.path, metavar="DIR", help="Models and results (default: reports)."),
    Option(
        name="report",
        parse=values.path,
        metavar="PATH",
        kind="many",
        help="Write a report; the suffix chooses the format. Repeatable.",
    ),
    Option(name="json", parse=values.path, metavar="PATH", help="Write the run record as JSON."),
    Option(
        name="allow-path",
        parse=values.path,
        metavar="DIR",
        kind="many",
        help="A folder outside the root that specs may name files in. Repeatable.",
    ),
    Option(
        name="baseline",
        parse=values.one_of(BASELINE_POLICIES),
        metavar="POLICY",
        help="Where a regression check has no baseline to compare with: require fails, warn skips; off "
        "compares nothing (default: require in CI, warn elsewhere).",
    ),
    Option(
        name="update",
        parse=values.one_of(UPDATES),
        metavar="WHICH",
        help="Write baselines. new: those that are missing; changed: also those that no longer hold; all: "
        "every one of the checks selected. Commit them.",
    ),
    Option(
        name="backend-option",
        parse=values.backend_option,
        metavar="BACKEND.WORD=VALUE",
        kind="many",
        help="How a backend builds and measures, such as tensorrt.opt-level=4. Repeatable.",
    ),
    Option(
        name="plugin",
        parse=values.path,
        metavar="LIB.so",
        kind="many",
        help="A plugin library for TensorRT. On the command line only. Repeatable.",
    ),
    Option(
        name="trtexec-args",
        parse=values.word,
        metavar="ARGS",
        help="More arguments for trtexec, quoted as one. On the command line only.",
    ),
    Option(name="update-in-ci", parse=values.switch, kind="switch", help="Allow --qdq-update in CI."),
)
_BY_KEY = {option.key: option for option in OPTIONS}
_COMMAND_LINE = frozenset({"plugin", "trtexec_args"})  # they load native code: no file may ask for that


def add_options(
    add: Callable[..., Any], *, prefix: str, only: Iterable[str] | None = None, skip: Iterable[str] = ()
) -> None:
    """Add the options to a parser through its ``add_argument`` or ``addoption``; ``dest`` is ``qdq_<key>``."""
    chosen = {option.name for option in OPTIONS} if only is None else set(only)
    for option in OPTIONS:
        if option.name not in chosen - set(skip):
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
    """The options that were written on a command line, by key, out of a namespace's values."""
    given = {option.key: values.get(f"qdq_{option.key}") for option in OPTIONS}
    return {key: value for key, value in given.items() if value is not None}


# ---- reading ------------------------------------------------------------------------------------


def load_settings(
    root: Path,
    *,
    flags: Mapping[str, object] | None = None,
    prefix: str = "--qdq-",
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    layout: Literal["spec/case", "case", ""] = "spec/case",
) -> Settings:
    """Settings from flags, then environment, then ``pyproject.toml`` of ``root``, then defaults.

    ``flags`` holds unparsed values by key. Relative paths of flags and environment start at ``cwd``
    (default: the current folder), those of the file at ``root``. Raises `ConfigError` naming the place of
    an unknown key or a value that does not fit.
    """
    here = cwd or Path.cwd()
    layers = (
        _from_file(root / "pyproject.toml"),
        _from_environment(os.environ if environ is None else environ),
        [(key, value, f"{prefix}{_BY_KEY[key].name}") for key, value in (flags or {}).items()],
    )
    _refuse_native_code((*layers[0], *layers[1]))
    found: dict[str, Setting] = {}
    for layer, base in zip(layers, (root, here, here), strict=True):
        for key, value, origin in layer:
            found[key] = Setting(name=key, value=_parsed(_BY_KEY[key], value, origin, base), origin=origin)
    if (os.environ if environ is None else environ).get("CI", "").lower() not in ("", "false"):
        _refuse_update(found)
        found.setdefault("baseline", Setting(name="baseline", value="require", origin="CI"))
    given: dict[str, Any] = {key: setting.value for key, setting in found.items()}
    origins = {key: setting.origin for key, setting in found.items()}
    return Settings(root=root, layout=layout, origins=origins, **given)


def _refuse_native_code(quiet: Iterable[tuple[str, object, str]]) -> None:
    """Who runs the command must see what is loaded; a file or variable may come with a repository."""
    for key, _, origin in quiet:
        if key in _COMMAND_LINE:
            raise ConfigError(
                f"{origin}: native code is loaded only where the command line says so",
                cure=f"give --qdq-{_BY_KEY[key].name} on the command line",
            )


def _refuse_update(found: Mapping[str, Setting]) -> None:
    """A baseline that CI writes would accept whatever CI was to find out."""
    allowed = "update_in_ci" in found and found["update_in_ci"].value is True
    if "update" in found and not allowed:
        raise ConfigError(
            f"{found['update'].origin}: baselines are not written in CI (the variable CI is set)",
            cure="write them on the same kind of machine and commit them, or add --qdq-update-in-ci",
        )


def list_settings(settings: Settings) -> tuple[Setting, ...]:
    """Every option with its value and origin, in the order of the table."""
    return tuple(
        Setting(
            name=option.name,
            value=getattr(settings, option.key),
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
        if key not in _BY_KEY:
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
    """``[tool.qdqspec]`` of a file; empty where it has none."""
    if not path.is_file():
        return {}
    try:
        table: object = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not valid TOML: {error}", where=path, cure="correct the file") from None
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
        return _based(option.parse(value), base)
    except ValueError as error:
        raise ConfigError(f"{origin}: '{value}' does not fit: {error}", cure=option.help) from None


def _based(value: object, base: Path) -> object:
    return base / value if isinstance(value, Path) else value
