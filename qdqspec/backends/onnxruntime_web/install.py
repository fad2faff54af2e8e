"""Finds Node, the pinned packages and a browser, and installs the packages into the user's cache folder.

``python -m qdqspec.backends.onnxruntime_web.install`` runs ``npm ci`` there with the lock file of this folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from qdqspec.backends._engine import ask_program
from qdqspec.errors import BackendUnavailableError

HERE = Path(__file__).parent
INSTALL = f"python -m {__package__}.install"
NODE = "install Node 20 or later with npm, and put node on PATH"
PACKAGE = "onnxruntime-web"
PLAYWRIGHT = "playwright-core"  # starts browsers; it installs none
BROWSER = "install Chromium or Google Chrome, and put chromium or google-chrome on PATH"
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OLDEST_NODE = 20


@cache
def pinned_version(package: str = PACKAGE) -> str:
    """The version of a package in package.json."""
    return str(json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"][package])


def modules_folder() -> Path:
    """The folder that the package is installed into: one for each version, in the user's cache folder."""
    cache_home = os.environ.get("XDG_CACHE_HOME")
    home = Path(cache_home) if cache_home else Path.home() / ".cache"
    return home / "qdqspec" / f"{PACKAGE}-{pinned_version()}"


def require_node() -> tuple[str, str]:
    """Path and version of Node. Raises `BackendUnavailableError` if it is missing or too old."""
    path = shutil.which("node")
    if path is None:
        raise BackendUnavailableError("there is no node on PATH", cure=NODE)
    version = _version_of(path, Path(path).stat().st_mtime_ns, NODE).removeprefix("v")
    major = version.split(".")[0]
    if not major.isdecimal() or int(major) < _OLDEST_NODE:
        raise BackendUnavailableError(f"Node {version or 'of unknown version'} is too old", cure=NODE)
    return path, version


def require_browser() -> tuple[str, str]:
    """Path and version of Chromium or Chrome. Raises `BackendUnavailableError` if it or playwright-core is missing."""
    require_package(PLAYWRIGHT)
    path = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if path is None:
        raise BackendUnavailableError("there is no Chromium on PATH", cure=BROWSER)
    printed = _version_of(path, Path(path).stat().st_mtime_ns, BROWSER)
    found = re.search(r"\d+(\.\d+)+", printed)
    if found is None:
        raise BackendUnavailableError(f"{path} --version printed no version: '{printed}'", cure=BROWSER)
    return path, found.group()


def require_package(package: str = PACKAGE) -> Path:
    """The folder with the packages. Raises `BackendUnavailableError` if this one or its pinned version is missing."""
    folder, wanted = modules_folder(), pinned_version(package)
    try:
        text = (folder / "node_modules" / package / "package.json").read_text(encoding="utf-8")
        found = json.loads(text).get("version")
    except (OSError, ValueError):
        what = f"{package} {wanted} is not installed in {folder}"
        raise BackendUnavailableError(what, cure=INSTALL) from None
    if found != wanted:
        raise BackendUnavailableError(f"{package} {found} is in {folder}, {wanted} is needed", cure=INSTALL)
    return folder


@cache
def _version_of(path: str, _changed: int, install: str) -> str:
    return ask_program(path, "--version", install).stdout.strip()


def main() -> int:
    """Install the package; returns npm's exit code."""
    npm = shutil.which("npm")
    if npm is None:
        sys.stderr.write(f"there is no npm on PATH; {NODE}\n")
        return 1
    folder = modules_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("package.json", "package-lock.json"):
        shutil.copyfile(HERE / name, folder / name)
    sys.stderr.write(f"installing {PACKAGE} {pinned_version()} into {folder}\n")
    command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    return subprocess.run(command, cwd=folder, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
