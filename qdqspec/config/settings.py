"""The options of a run, declared by the fields of `Settings`, and their values, each with its origin.

An option is ``--qdq-x-y`` of pytest, ``--x-y`` of the command line, ``QDQSPEC_X_Y`` and a key of ``[tool.qdqspec]``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, cast, get_args

from qdqspec.config.declared import (
    BACKEND,
    BACKEND_OPTION,
    PATH,
    TEXT,
    TIME,
    TRUTH,
    ValueType,
    check_option,
    one_of,
    require_plugins,
    whole,
)
from qdqspec.errors import ConfigError
from qdqspec.registry import did_you_mean

Mode = Literal["run", "measure", "verify", "plan"]
BaselinePolicy = Literal["require", "warn", "off"]
Update = Literal["new", "changed", "all"]

DEFAULT_BACKEND = "onnxruntime"  # which is also the reference: it computes a model as ONNX defines it
MODES: tuple[Mode, ...] = get_args(Mode)
REQUIREMENTS = ("device", "conclusive")
ENVIRONMENT_PREFIX = "QDQSPEC_"
# Why no file or variable may set an option: they may come with a repository.
NATIVE_CODE = "native code is loaded only where the command line permits it"
REMOTE_CODE = "a cluster is used only where the command line names it, since its scheduler can run code here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: ``type`` reads its values.

    ``kind`` is ``one`` value, ``many`` (repeatable) or a ``switch``. ``sets`` is the option of a backend,
    ``BACKEND.WORD``, that the value is given to: `Settings` has it in ``backend_option``. ``command_line`` is why
    only the command line sets it, empty if files and variables may.
    """

    name: str  # with dashes
    type: ValueType
    help: str
    metavar: str = ""
    kind: Literal["one", "many", "switch"] = "one"
    sets: str = ""
    command_line: str = ""

    @property
    def key(self) -> str:
        """The field of `Settings`, and the key in TOML."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.key.upper()


def _option(default: Any, type_: ValueType, metavar: str, text: str, command_line: str = "") -> Any:
    """A field of `Settings` that is an option; it is repeatable if the default is a tuple."""
    kind = "many" if isinstance(default, tuple) else "switch" if type_ is TRUTH else "one"
    words = {"type": type_, "metavar": metavar, "help": text, "kind": kind, "command_line": command_line}
    return field(default=default, metadata=words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of a run. Relative paths are relative to ``root``, times are in seconds.

    ``layout`` is the folder structure of ``output``. ``in_ci`` is whether the variable ``CI`` is set; there, a cached
    winner is replaced only on request. ``origins`` has the origin of each option that was given.
    """

    root: Path = field(default_factory=Path.cwd)
    backend: str = _option(
        DEFAULT_BACKEND, BACKEND, "NAME", f"Inference backend (default: {DEFAULT_BACKEND})."
    )
    mode: Mode = _option(
        "run",
        one_of(*MODES),
        "MODE",
        "run: use the cached winner, or tune if there is none; measure: time the known winner again; "
        "verify: only checks that need no timing; plan: report the size and cost of the search, build nothing "
        "(default: run).",
    )
    cache_dir: Path = _option(
        Path(".qdqspec/cache"),
        PATH,
        "DIR",
        "Folder of the cache of finished searches (default: .qdqspec/cache).",
    )
    no_cache: bool = _option(False, TRUTH, "", "Neither read nor write the cache.")
    retune: bool = _option(False, TRUTH, "", "Search again although a winner is cached, and replace it.")
    seed: int = _option(0, whole(0), "N", "Seed of search and random inputs (default: 0).")
    threads: int = _option(1, whole(1), "N", "Number of threads for inference (default: 1).")
    jobs: int = _option(
        1,
        whole(1),
        "N",
        "Run up to N builds in parallel while no measurement is pending; only on backends that time no "
        "kernels during a build (default: 1).",
    )
    device: int = _option(
        0, whole(0), "N", "Index of the GPU in CUDA's numbering, for backends that use a GPU (default: 0)."
    )
    time_limit: float | None = _option(
        None,
        TIME,
        "TIME",
        "Time limit of the whole run, such as 20m. Checks that are not decided by then are inconclusive.",
    )
    build_limit: float | None = _option(
        None,
        TIME,
        "TIME",
        "Time limit of each build, such as 30m. A build that takes longer is a failed trial (default: 10m).",
    )
    require: tuple[str, ...] = _option(
        (),
        one_of(*REQUIREMENTS),
        "WHAT",
        "device: a check fails if its backend is missing; conclusive: a check fails if its measurement is "
        "inconclusive. Both are skips otherwise. Repeatable.",
    )
    scheme: str | None = _option(
        None, TEXT, "DIGEST", "Evaluate the checks on this known placement, without a search."
    )
    output: Path = _option(Path("reports"), PATH, "DIR", "Folder of models and results (default: reports).")
    report: tuple[Path, ...] = _option(
        (), PATH, "PATH", "Write a report; the suffix selects the format. Repeatable."
    )
    json: Path | None = _option(None, PATH, "PATH", "Write the run record as JSON.")
    allow_path: tuple[Path, ...] = _option(
        (), PATH, "DIR", "A folder outside the root, whose files specs may name. Repeatable."
    )
    baseline: BaselinePolicy = _option(
        "warn",
        one_of(*get_args(BaselinePolicy)),
        "POLICY",
        "Regression checks without a baseline. require: they fail; warn: they are skipped. off: no "
        "comparison with baselines (default: require in CI, warn elsewhere).",
    )
    update: Update | None = _option(
        None,
        one_of(*get_args(Update)),
        "WHICH",
        "Write baselines. new: missing ones; changed: also those that no longer match; all: those of all "
        "selected checks. Commit them.",
    )
    backend_option: tuple[str, ...] = _option(
        (),
        BACKEND_OPTION,
        "BACKEND.WORD=VALUE",
        "Set an option of a backend for builds and measurements; doctor lists the options. Repeatable.",
    )
    plugin: tuple[Path, ...] = _option(
        (),
        PATH,
        "LIB.so",
        "A library of custom operators or plugins of the backend. On the command line only. Repeatable.",
        NATIVE_CODE,
    )
    cluster: str | None = _option(
        None,
        TEXT,
        "ADDRESS",
        "Run each case on a worker of the scheduler at this address, such as tls://10.0.0.5:8786.",
        REMOTE_CODE,
    )
    cluster_device: str | None = _option(
        None,
        TEXT,
        "KEY",
        "Device key of the workers to use, if they have several for the backend; qdqspec cluster list shows them.",
    )
    cluster_tls: Path = _option(
        Path(".qdqspec/cluster"),
        PATH,
        "DIR",
        "Certificates of the cluster (default: .qdqspec/cluster).",
        REMOTE_CODE,
    )
    update_in_ci: bool = _option(False, TRUTH, "", "Allow --qdq-update in CI.")
    layout: Literal["spec/case", "case", ""] = "spec/case"
    in_ci: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        for name in ("cache_dir", "output", "cluster_tls"):
            object.__setattr__(self, name, self.root / getattr(self, name))

    @property
    def extra(self) -> dict[str, str]:
        """The words for backends: the options given in that form, and the plugins."""
        words = dict(option.split("=", 1) for option in self.backend_option)
        plugins = {f"{self.backend}.plugins": os.pathsep.join(map(str, self.plugin))}
        return words | (plugins if self.plugin else {})

    @property
    def device_words(self) -> list[str]:
        """The options of pytest that chose the device and set the backend's options."""
        given = [key for key in ("backend", "device", "threads") if key in self.origins]
        return [
            *(f"--qdq-{key}={getattr(self, key)}" for key in given),
            *(f"--qdq-backend-option={option}" for option in self.backend_option),
            *(f"--qdq-plugin={file}" for file in self.plugin),
        ]


# The only option of one backend with a name of its own: docs/decisions/0062.
_TOOL_ARGUMENTS = "trtexec-args"

OPTIONS: tuple[Option, ...] = (
    *(
        Option(name=each.name.replace("_", "-"), **each.metadata)
        for each in fields(Settings)
        if each.metadata
    ),
    Option(
        name=_TOOL_ARGUMENTS,
        sets=_TOOL_ARGUMENTS.replace("-", "."),
        type=TEXT,
        metavar="ARGS",
        help="More arguments for this tool, quoted as one. On the command line only.",
        command_line=NATIVE_CODE,
    ),
)
BY_KEY = {option.key: option for option in OPTIONS}
# How the backend builds, for each command that builds.
BUILD_OPTIONS = ("backend-option", "plugin", *(option.name for option in OPTIONS if option.sets))


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
    many = option.kind == "many"
    found = []
    for one in value if many and isinstance(value, list | tuple) else [value]:
        try:
            read = option.type.read(one)
        except ValueError as error:
            raise ConfigError(f"{origin}: '{one}' does not fit: {error}", cure=option.help) from None
        found.append(base / read if isinstance(read, Path) else read)
    return tuple(found) if many else found[0]
