"""The values of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Mode = Literal["run", "measure", "verify", "plan"]
BaselinePolicy = Literal["require", "warn", "off"]
Update = Literal["new", "changed", "all"]

DEFAULT_BACKEND = "onnxruntime"  # which is also the reference: it computes a model as ONNX defines it
MODES: tuple[Mode, ...] = ("run", "measure", "verify", "plan")
REQUIREMENTS = ("device", "conclusive")
BASELINE_POLICIES: tuple[BaselinePolicy, ...] = ("require", "warn", "off")
UPDATES: tuple[Update, ...] = ("new", "changed", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of a run. Relative paths are relative to ``root``.

    ``time_limit``, and ``build_limit`` for each build, are in seconds. ``require`` turns skips into failures:
    ``device`` those for a missing backend, ``conclusive`` those for an undecided measurement. ``baseline`` is
    the policy for a missing baseline. ``retune`` searches again although a winner is cached; ``in_ci`` is
    whether the variable ``CI`` is set; there, a cached winner is replaced only on request. ``origins`` has the
    origin of each option that was given; ``layout`` is the folder structure of ``output``. ``cluster`` is the address
    of a scheduler.
    """

    root: Path = field(default_factory=Path.cwd)
    backend: str = DEFAULT_BACKEND
    mode: Mode = "run"
    cache_dir: Path = Path(".qdqspec/cache")
    no_cache: bool = False
    retune: bool = False
    seed: int = 0
    threads: int = 1
    jobs: int = 1
    device: int = 0
    time_limit: float | None = None
    build_limit: float | None = None
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
    cluster: str | None = None
    cluster_device: str | None = None
    cluster_tls: Path = Path(".qdqspec/cluster")
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
