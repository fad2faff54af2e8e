"""Code for a specific runtime is in the folder of its backend: no other file of the package names a runtime."""

from __future__ import annotations

import re
from pathlib import Path

from qdqspec._core import registry
from qdqspec._core.config.settings import DEFAULT_BACKEND

PACKAGE = Path(__file__).parents[2] / "qdqspec"
RUNTIMES = [name.replace("-", "[-_]") for name in registry.built_in("backend") if name != "fake"]
NAMED = re.compile("|".join([*RUNTIMES, "onnx runtime"]), re.IGNORECASE)
ALLOWED = (
    f'DEFAULT_BACKEND = "{DEFAULT_BACKEND}"',
    # observed behaviour of a runtime, as the source of code for all backends
    "whether 8-bit weights are safe: ONNX Runtime's",
    "In ONNX Runtime's order of preference (MLAS",
)


def test_only_backends_name_a_runtime():
    named = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        if len(parts) < 3 or parts[0] != "backends":
            lines = path.read_text(encoding="utf-8").splitlines()
            named += [f"{path.relative_to(PACKAGE)}: {line.strip()}" for line in lines if NAMED.search(line)]
    left = [line for line in named if not any(text in line for text in ALLOWED)]
    cure = (
        "declare it in the backend's folder (qdqspec/_core/config/hooks.py), or write what any backend does:"
    )
    assert not left, "\n".join([cure, *left])
    assert len(named) == len(ALLOWED), "each exception is one line"
