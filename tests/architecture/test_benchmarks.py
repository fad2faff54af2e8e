"""Each benchmark can be imported, because other checks do not cover the parts of the package that it uses."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
# of PyTorch, NNCF, AMD Quark and ModelOpt, which are not dependencies
OWN_ENVIRONMENTS = ("architectures", "nncf_run", "peer", "quark_run")
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in OWN_ENVIRONMENTS)


def test_each_benchmark_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    for name in NAMES:
        importlib.import_module(name)
