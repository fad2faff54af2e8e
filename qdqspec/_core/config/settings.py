"""The values of a run, each of which is an option: `Settings` declares their names, types, defaults and help."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from qdqspec._core.config.declared import (
    BACKEND,
    BACKEND_OPTION,
    PATH,
    TEXT,
    TIME,
    TRUTH,
    ValueType,
    one_of,
    whole,
)

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
