"""Settings of a run: options, environment, ``[tool.qdqspec]``, defaults, in this order; and the folders of results.

`Settings` declares the options, `load_settings` reads their values, each with its origin. An option is ``--qdq-x-y`` of
pytest, ``--x-y`` of the command line, ``QDQSPEC_X_Y`` and a key of ``[tool.qdqspec]``. Requirements on a model are set
in specs, not here.
"""

from __future__ import annotations

import itertools
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from qdqspec._core.files import create_file, replace_file
from qdqspec._core.hooks import declared
from qdqspec._core.options import (
    BACKEND,
    BACKEND_OPTION,
    ENVIRONMENT_PREFIX,
    NATIVE_CODE,
    PATH,
    SWITCH,
    TEXT,
    TIME,
    Option,
    check_option,
    one_of,
    option,
    options_of,
    whole,
)
from qdqspec._core.registry import DEFAULT_BACKEND, did_you_mean
from qdqspec.errors import ConfigError
from qdqspec.types import Case

Mode = Literal["run", "measure", "verify", "plan"]
BaselinePolicy = Literal["require", "warn", "off"]
Update = Literal["new", "changed", "all"]

# Why no file or variable may set the option.
REMOTE_CODE = "a cluster is used only where the command line names it, since its scheduler can run code here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of a run. Relative paths are relative to ``root``, times are in seconds.

    ``layout`` is the folder structure of ``output``. ``in_ci`` is whether the variable ``CI`` is set; there, a cached
    winner is replaced only on request. ``origins`` has the origin of each option that was given.
    """

    root: Path = field(default_factory=Path.cwd)
    backend: str = option(BACKEND, "Inference backend.", DEFAULT_BACKEND, metavar="NAME")
    mode: Mode = option(
        one_of(*get_args(Mode)),
        "run: use the cached winner, or tune if there is none; measure: time the known winner again; "
        "verify: only checks that need no timing; plan: report the size and cost of the search, build nothing.",
        "run",
        metavar="MODE",
    )
    cache_dir: Path = option(
        PATH, "Folder of the cache of finished searches.", Path(".qdqspec/cache"), metavar="DIR"
    )
    no_cache: bool = option(SWITCH, "Neither read nor write the cache.", False)
    retune: bool = option(SWITCH, "Search again although a winner is cached, and replace it.", False)
    seed: int = option(whole(0), "Seed of search and random inputs.", 0, metavar="N")
    threads: int = option(whole(1), "Number of threads for inference.", 1, metavar="N")
    jobs: int = option(
        whole(1),
        "Run up to N builds in parallel while no measurement is pending; only on backends that time no "
        "kernels during a build.",
        1,
        metavar="N",
    )
    device: int = option(
        whole(0), "Index of the GPU in CUDA's numbering, for backends that use a GPU.", 0, metavar="N"
    )
    time_limit: float | None = option(
        TIME,
        "Time limit of the whole run, such as 20m. Checks that are not decided by then are inconclusive.",
        metavar="TIME",
    )
    build_limit: float | None = option(
        TIME,
        "Time limit of each build, such as 30m. A build that takes longer is a failed trial.",
        metavar="TIME",
        shown="10m",
    )
    require: tuple[str, ...] = option(
        one_of("device", "conclusive"),
        "device: a check fails if its backend is missing; conclusive: a check fails if its measurement is "
        "inconclusive. Both are skips otherwise. Repeatable.",
        (),
        metavar="WHAT",
    )
    scheme: str | None = option(
        TEXT, "Evaluate the checks on this known placement, without a search.", metavar="DIGEST"
    )
    output: Path = option(PATH, "Folder of models and results.", Path("reports"), metavar="DIR")
    report: tuple[Path, ...] = option(
        PATH, "Write a report; the suffix selects the format. Repeatable.", (), metavar="PATH"
    )
    json: Path | None = option(PATH, "Write the run record as JSON.", metavar="PATH")
    allow_path: tuple[Path, ...] = option(
        PATH, "A folder outside the root, whose files specs may name. Repeatable.", (), metavar="DIR"
    )
    baseline: BaselinePolicy = option(
        one_of(*get_args(BaselinePolicy)),
        "Regression checks without a baseline. require: they fail; warn: they are skipped. off: no "
        "comparison with baselines.",
        "warn",
        metavar="POLICY",
        shown="require in CI, warn elsewhere",
    )
    update: Update | None = option(
        one_of(*get_args(Update)),
        "Write baselines. new: missing ones; changed: also those that no longer match; all: those of all "
        "selected checks. Commit them.",
        metavar="WHICH",
    )
    backend_option: tuple[str, ...] = option(
        BACKEND_OPTION,
        "Set an option of a backend for builds and measurements; doctor lists the options. Repeatable.",
        (),
        metavar="BACKEND.WORD=VALUE",
    )
    plugin: tuple[Path, ...] = option(
        PATH,
        "A library of custom operators or plugins of the backend. On the command line only. Repeatable.",
        (),
        metavar="LIB.so",
        command_line=NATIVE_CODE,
    )
    cluster: str | None = option(
        TEXT,
        "Run each case on a worker of the scheduler at this address, such as tls://10.0.0.5:8786.",
        metavar="ADDRESS",
        command_line=REMOTE_CODE,
    )
    cluster_device: str | None = option(
        TEXT,
        "Device key of the workers to use, if they have several for the backend; qdqspec cluster list shows them.",
        metavar="KEY",
    )
    cluster_tls: Path = option(
        PATH,
        "Certificates of the cluster.",
        Path(".qdqspec/cluster"),
        metavar="DIR",
        command_line=REMOTE_CODE,
    )
    update_in_ci: bool = option(SWITCH, "Allow --qdq-update in CI.", False)
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


def _own_options() -> Iterator[Option]:
    """The options of `Settings`, with the default in the help; then those of backends with an option of their own."""
    for each in fields(Settings):
        if each.metadata:
            found = Option(name=each.name.replace("_", "-"), key=each.name, **each.metadata)
            with_default = f"{found.help.removesuffix('.')} (default: {found.shown})."
            has_default = found.kind == "one" and bool(found.shown)
            yield replace(found, help=with_default) if has_default else found
    for backend, words in declared("command_line", built_in=True).items():
        for word, text in words.items():
            yield Option(
                name=f"{backend}-{word}",
                key=f"{backend}_{word}".replace("-", "_"),
                sets=f"{backend}.{word}",
                type=TEXT,
                metavar=word.upper(),
                help=f"{text} On the command line only.",
                command_line=NATIVE_CODE,
            )


OPTIONS = tuple(_own_options())
BY_KEY = {option.key: option for option in OPTIONS}
# How the backend builds, for each command that builds.
BUILD_OPTIONS = ("backend-option", "plugin", *(option.name for option in OPTIONS if option.sets))


def add_options(add: Callable[..., Any], *, prefix: str, only: Iterable[str] | None = None) -> None:
    """Add the options to a parser through its ``add_argument`` or ``addoption``; ``dest`` is ``qdq_<key>``."""
    for each in OPTIONS:
        if only is not None and each.name not in only:
            continue
        words: dict[str, Any] = {"dest": f"qdq_{each.key}", "default": None, "help": each.help}
        if each.kind == "switch":
            words["action"] = "store_true"
        else:
            words["metavar"] = each.metavar
            if each.kind == "many":
                words["action"] = "append"
        add(f"{prefix}{each.name}", **words)


def flags_given(values: Mapping[str, object]) -> dict[str, object]:
    """The options given on a command line, by key, from a namespace's values."""
    given = {option.key: values.get(f"qdq_{option.key}") for option in OPTIONS}
    return {key: value for key, value in given.items() if value is not None}


def load_settings(
    root: Path,
    *,
    flags: Mapping[str, object] | None = None,
    configured: Mapping[str, object] | None = None,
    prefix: str = "--qdq-",
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Settings:
    """Settings from flags, then environment, then the nearest ``pyproject.toml`` at or above ``root``, then defaults.

    ``flags`` holds unparsed values by key; ``configured`` those flags that a file gave, such as pytest's
    ``addopts``. Relative paths of flags and environment start at ``cwd`` (default: the current folder), the
    file's at its folder. Raises `ConfigError` naming the place of an unknown key or an invalid value.
    """
    home = find_root(root)  # a folder with a pytest.ini of its own is a root without the project's file
    here, environ = cwd or Path.cwd(), os.environ if environ is None else environ
    command_line = [(key, value, f"{prefix}{BY_KEY[key].name}") for key, value in (flags or {}).items()]
    addopts = [
        (key, value, f"{prefix}{BY_KEY[key].name} of addopts") for key, value in (configured or {}).items()
    ]
    layers = (
        (_from_file(home / "pyproject.toml"), home),
        (_from_environment(environ), here),
        (addopts, here),
        (command_line, here),
    )
    found: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer, base in layers:
        is_typed = layer is command_line
        for key, value, origin in layer:
            if BY_KEY[key].command_line and not is_typed:
                cure = f"give {prefix}{BY_KEY[key].name} on the command line"
                raise ConfigError(f"{origin}: {BY_KEY[key].command_line}", cure=cure)
            found[key], origins[key] = _parsed(BY_KEY[key], value, origin, base), origin
            if key == "backend_option":  # this imports the named backends
                for text in found[key]:
                    check_option(text, origin, command_line=is_typed, prefix=prefix)
    in_ci = environ.get("CI", "").lower() not in ("", "false")
    if in_ci:
        if "update" in found and not found.get("update_in_ci"):
            raise ConfigError(  # a baseline written there would accept any regression
                f"{origins['update']}: baselines are not written in CI (the variable CI is set)",
                cure="write them on the same kind of machine and commit them, or add --qdq-update-in-ci",
            )
        if "baseline" not in found:
            found["baseline"], origins["baseline"] = "require", "CI"
    given: dict[str, Any] = {key: found[key] for key in found if not BY_KEY[key].sets}
    own = (f"{BY_KEY[key].sets}={found[key]}" for key in found if BY_KEY[key].sets)
    given["backend_option"] = (*given.get("backend_option", ()), *own)
    settings = Settings(root=root, in_ci=in_ci, origins=origins, **given)
    if settings.plugin and "plugins" not in (each.name for each in options_of(settings.backend).options):
        what = f"{origins['plugin']}: backend {settings.backend} loads no plugin libraries"
        raise ConfigError(what, cure="leave it out")
    return settings


def read_overrides(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings given in Python, with the types of options; times may be numbers of seconds.

    Raises `ConfigError` for a name or a value that does not fit.
    """
    known, read = [each.name for each in fields(Settings)], dict(given)
    for key, value in given.items():
        if key not in known:
            what = f"unknown setting '{key}'{did_you_mean(key, known)}"
            raise ConfigError(
                what, cure=f"known: {', '.join(known)}; options of a case are arguments of tune"
            )
        if key not in BY_KEY or BY_KEY[key].type in (BACKEND, TEXT) or value is None:
            continue
        is_seconds = BY_KEY[key].type is TIME and isinstance(value, int | float) and value >= 0
        read[key] = value if is_seconds else _parsed(BY_KEY[key], value, key, Path())
    return read


def list_settings(settings: Settings) -> Iterator[tuple[str, object, str]]:
    """The name, value and origin of each option, in the order of the table."""
    for each in OPTIONS:
        value = settings.extra.get(each.sets, "") if each.sets else getattr(settings, each.key)
        yield each.name, value, settings.origins.get(each.key, "default")


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
    for name in sorted(name for name in environ if name.startswith(ENVIRONMENT_PREFIX)):
        if name not in by_variable:
            what = f"unknown environment variable {name}{did_you_mean(name, list(by_variable))}"
            raise ConfigError(what, cure="unset it, or correct its name")
        option, value = by_variable[name], environ[name]
        layer.append((option.key, value.split(os.pathsep) if option.kind == "many" else value, name))
    return layer


def _from_file(path: Path) -> _Layer:
    """The values of the table ``[tool.qdqspec]`` of a file, if there is one."""
    if not path.is_file():
        return []
    try:
        table: object = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not valid TOML: {error}", where=path, cure="correct the file") from None
    except RecursionError:  # of tomllib, for deeply nested brackets
        raise ConfigError("it nests too deep", where=path, cure="correct the file") from None
    except OSError as error:
        what = f"it cannot be read: {error.strerror}"
        raise ConfigError(what, where=path, cure="make it readable") from None
    for name in ("tool", "qdqspec"):
        table = table.get(name, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict):
        raise ConfigError("[tool.qdqspec] must be a table", where=path, cure="write [tool.qdqspec] on a line")
    known = [option.name for option in OPTIONS]
    for name in table:
        if name.replace("-", "_") not in BY_KEY:
            what = f"[tool.qdqspec] has an unknown key '{name}'{did_you_mean(name, known)}"
            raise ConfigError(what, where=path, cure=f"known: {', '.join(known)}")
    return [(name.replace("-", "_"), table[name], f"{path.name} [tool.qdqspec] {name}") for name in table]


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


# ---- folders of results --------------------------------------------------------------------------

_NOTE = ".spec.json"


def find_folder(settings: Settings, case: Case, *, claim: bool = False) -> Path:
    """The folder of a case's files: ``output/<spec>/<case>``, or according to ``settings.layout``.

    If several folders have specs of one name, the spec that ran first keeps it, recorded in a file in ``<spec>/``, and
    another one uses ``<spec>.<its folder>/<case>``, so that results of two specs are never mixed. ``claim`` records
    the spec. A folder named on the command line holds that file itself.
    """
    output, root = settings.output, settings.root
    if settings.layout != "spec/case":
        return output / case.id if settings.layout else output
    home = (case.spec or case.model).parent
    parts = home.relative_to(root).parts if home.is_relative_to(root) else (home.name,)
    longer = f"{case.spec_name}.{'-'.join(parts) or 'root'}"
    mine = _note(case, output)
    for name in itertools.chain((case.spec_name, longer), (f"{longer}-{n}" for n in itertools.count(2))):
        owner = _present_owner(output / name, output)
        if owner is None and claim:
            owner = _record_owner(output / name, mine, output)
        if owner is None or _is_same(owner, mine):
            return output / name / case.id
    raise AssertionError("names never end")


def claim_folder(settings: Settings, case: Case) -> Path:
    """The folder of a case's files, recorded as owned by its spec. Called before files are written."""
    return find_folder(settings, case, claim=True)


def other_owner(folder: Path, case: Case) -> str | None:
    """The spec or model that owns a named output folder; ``None`` if it is this case's own, or free."""
    note = _read_note(folder)
    if note is None or _is_same(note, _note(case, folder)):
        return None
    return str(note.get("spec") or note.get("model"))


def note_owner(folder: Path, case: Case) -> None:
    """Record the owner of a named output folder. Raises ``OSError``."""
    replace_file(folder / _NOTE, json.dumps(_note(case, folder), indent=1) + "\n")


def _note(case: Case, output: Path) -> dict[str, str | None]:
    """The owner of a folder, by paths relative to the output folder, so that the project can be moved."""
    note: dict[str, str | None] = {"spec": None}
    for name, path in (("spec", case.spec), ("model", case.model)):
        if path is not None:
            try:
                note[name] = Path(os.path.relpath(path, output)).as_posix()
            except ValueError:  # on another drive
                note[name] = path.as_posix()
    return note


def _is_same(note: Mapping[str, object], mine: Mapping[str, object]) -> bool:
    """Whether both are of one spec; a bare model and a spec are the same if the spec is of that model."""
    what = "spec" if note.get("spec") and mine["spec"] else "model"
    return note.get(what) == mine[what]


def _read_note(folder: Path) -> Mapping[str, object] | None:
    """The record of the owner; ``None`` if it is missing or damaged."""
    with suppress(OSError, ValueError, RecursionError):
        note = json.loads((folder / _NOTE).read_bytes())
        return note if isinstance(note, dict) else None
    return None


def _present_owner(folder: Path, output: Path) -> Mapping[str, object] | None:
    """The recorded owner, unless it no longer exists: it was renamed or deleted."""
    note = _read_note(folder)
    is_present = note is not None and (output / str(note.get("spec") or note.get("model"))).exists()
    return note if is_present else None


def _record_owner(folder: Path, mine: Mapping[str, object], output: Path) -> Mapping[str, object]:
    """Record the owner; the other one if another process has recorded it. Errors are reported by later writes."""
    text = json.dumps(mine, indent=1) + "\n"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            create_file(folder / _NOTE, text)
        except FileExistsError:
            if (owner := _present_owner(folder, output)) is not None:
                return owner
            replace_file(folder / _NOTE, text)
    return mine
