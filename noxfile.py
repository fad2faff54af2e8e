"""Sessions of nox: tests on each Python, with the oldest stated dependencies, and of the built package.

``nox -s tests-3.12``, ``nox -s oldest``, ``nox -s package``. They take long and are not part of ``.ci/run``.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = (
    "cluster",
    "completion",
    "images",
    "openvino",
    "qnn",
    "optuna",
    "report",
)  # with bindings of TensorRT comes a GPU
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "uv|virtualenv"


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """The test suite on a Python; arguments after ``--`` replace the folder."""
    session.install(".[dev]")
    session.run("pytest", *(session.posargs or ("tests", "-m", "integration or not integration")))


@nox.session(python=PYTHONS[0])
def oldest(session: nox.Session) -> None:
    """The test suite with the oldest stated version of each dependency, also of extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (project["optional-dependencies"][extra] for extra in EXTRAS)
    stated = [*project["dependencies"], *(one for extra in extras for one in extra)]
    pinned = [one.replace(">=", "==", 1) for one in stated]
    session.install(".[dev]", *pinned)
    session.run("pytest", *(session.posargs or ("tests", "-m", "integration or not integration")))


@nox.session(python=PYTHONS[0])
def package(session: nox.Session) -> None:
    """Build wheel and sdist, check them, and use the wheel in a fresh environment."""
    folder = Path(session.create_tmp()).resolve()
    session.install("build", "twine")
    session.run("python", "-m", "build", "--outdir", str(folder), str(ROOT))
    built = sorted(folder.glob("qdqspec-*"))
    session.run("twine", "check", "--strict", *map(str, built))
    (wheel,) = (file for file in built if file.suffix == ".whl")
    if wheel.stat().st_size > 1_500_000:
        session.error(f"the wheel has {wheel.stat().st_size:,} bytes, more than 1.5 MB")
    session.install("--force-reinstall", str(wheel))
    elsewhere = folder / "elsewhere"  # so that the checkout is not imported
    elsewhere.mkdir(exist_ok=True)
    shutil.copy(ROOT / "specs" / "models" / "digits_resnet.onnx", elsewhere)
    with session.chdir(elsewhere):
        version = session.run("qdqspec", "--version", silent=True)
        found = re.search(
            r'__version__ = "(.+)"', (ROOT / "qdqspec" / "__init__.py").read_text(encoding="utf-8")
        )
        if found is None or found[1] not in str(version):
            session.error(f"the wheel's version is {version}")
        session.run("qdqspec", "init", "digits_resnet.onnx", "-o", "specs/digits.qdq.yaml")
        session.run("pytest", "specs", "--qdq-backend=fake", "--qdq-time-limit=20s", success_codes=[0, 1])
