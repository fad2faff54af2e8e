"""Another Python environment that engines can run in: another version of a runtime, measured by this qdqspec.

Its interpreter runs the worker module of this installation, which alone is put in front of its own packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from qdqspec._core.files import TemporaryFolder
from qdqspec._core.programs import python_command
from qdqspec._core.records import from_data, to_data
from qdqspec.backends.base import Availability, BuildOptions, backend_named
from qdqspec.errors import BackendUnavailableError, ConfigError
from qdqspec.types import DeviceKey

_PACKAGE = Path(__file__).parents[2]
_SECONDS = 120.0  # to import a runtime, on a loaded machine
_MISSING = re.compile(r"No module named '([\w.]+)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed(Availability):
    """A backend as installed in an environment, and its device if it is usable."""

    device: DeviceKey | None = None


class Environment:
    """The environment of an interpreter, such as ``next/bin/python``. Close it after its engines."""

    def __init__(self, python: Path) -> None:
        """Raises `ConfigError` if there is no such interpreter."""
        found = shutil.which(python) or str(python)  # a bare name is one on the PATH
        self.python = Path(found).absolute()  # not resolved: the link of a virtual environment identifies it
        if not self.python.is_file() or not os.access(self.python, os.X_OK):
            raise ConfigError(
                "there is no interpreter of this name",
                where=python,
                cure="name the python of an environment, such as next/bin/python",
            )
        self._own = TemporaryFolder()
        link = self._own.path / _PACKAGE.name  # the package is importable without those installed beside it
        try:
            link.symlink_to(_PACKAGE, target_is_directory=True)
        except OSError:  # systems without links for all users
            shutil.copytree(_PACKAGE, link, ignore=shutil.ignore_patterns("__pycache__"))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that make the interpreter import this qdqspec, and all else from its own."""
        return {"PYTHONPATH": str(self._own.path)}

    def installed(self, backend: str, options: BuildOptions) -> Installed:
        """The backend as installed there. Raises `BackendUnavailableError` if a dependency of qdqspec is missing."""
        words = backend, json.dumps(to_data(options))
        command, env = python_command(__name__, *words, interpreter=self)
        try:
            ended = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            what = f"the interpreter does not run: {error}"
            raise BackendUnavailableError(what, where=self.python) from None
        if ended.returncode:
            missing = _MISSING.search(ended.stderr)
            last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
            what = f"qdqspec does not run in this environment: {last}"
            if missing:
                what = f"the environment lacks {missing[1]}"
            cure = f"{self.python} -m pip install qdqspec"
            raise BackendUnavailableError(what, where=self.python, cure=cure)
        return from_data(Installed, json.loads(ended.stdout.splitlines()[-1]))

    def close(self) -> None:
        """Remove the temporary folder. May be called twice."""
        self._own.close()


def _main(backend: str, options: str) -> None:
    words = from_data(BuildOptions, json.loads(options))
    found = backend_named(backend)
    state = found.probe(words)
    installed = Installed(**asdict(state), device=found.device(words) if state.usable else None)
    sys.stdout.write(f"\n{json.dumps(to_data(installed))}\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
