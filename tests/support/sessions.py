"""Sessions on a simulated device with little noise, their builds, and searches that are interrupted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import arrays_of

from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions
from qdqspec.types import Case, Progress

QUIET = {"fake.run_noise": "0.005", "fake.wall_noise": "0.01", "fake.build_noise": "0.002"}
Open = Callable[..., Session]


def quiet_session(root: Path, words: Mapping[str, str] | None = None, **settings: Any) -> Session:
    """A session in ``root`` with these options of the simulated device."""
    session = Session(**{"backend": "fake", "root": root, **settings})
    session.runtime().options = BuildOptions(extra={**QUIET, **(words or {})})
    return session


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder and of those in it, without locks."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".lock")
    }


def change_builds(session: Session, change: Callable[[Path, BuildOptions], BuildOptions]) -> None:
    """Call ``change`` before each build of the session; it returns the options of the build, or raises."""
    backend = session.runtime().backend
    build = backend.build
    backend.build = lambda model, options: build(model, change(model, options))  # type: ignore[method-assign]


def count_builds(session: Session) -> list[Path]:
    """The model files that the session builds from now on."""
    built: list[Path] = []

    def count(model: Path, options: BuildOptions) -> BuildOptions:
        built.append(model)
        return options

    change_builds(session, count)
    return built


def few_digits(models: Path, folder: Path, samples: int) -> Path:
    """A file with the first calibration samples of the digits classifier."""
    images = arrays_of(models.parent / "data" / "digits_calibration.npz")["input"]
    np.savez(folder / "calibration.npz", input=images[:samples])
    return folder / "calibration.npz"


def interrupted(session: Session, case: Case, after: int) -> None:
    """Run the case and interrupt it after ``after`` trials as Ctrl-C does."""

    def watch(progress: Progress) -> None:
        if progress.done == after:
            raise KeyboardInterrupt

    session.watch = watch
    with pytest.raises(KeyboardInterrupt):
        session.search(case)
