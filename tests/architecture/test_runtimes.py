"""Code for a specific runtime is in the folder of its backend: no other file of the package names a runtime."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from qdqspec._core import registry
from qdqspec._core.config.settings import DEFAULT_BACKEND

PACKAGE = Path(__file__).parents[2] / "qdqspec"
RUNTIMES = [name for name in registry.built_in("backend") if name != "fake"]
PRODUCTS = ["onnx runtime"]  # names in texts that differ from those of backends
NAMED = re.compile("|".join([*(name.replace("-", "[-_]") for name in RUNTIMES), *PRODUCTS]), re.IGNORECASE)

# Exceptions: file, text of the line, reason.
ALLOWED = [
    (
        "config/settings.py",
        f'DEFAULT_BACKEND = "{DEFAULT_BACKEND}"',
        "the one place that chooses the default",
    ),
]

# Observed behaviour of a runtime or its tools, as the source of code for all backends.
OBSERVED = [
    "whether 8-bit weights are safe: ONNX Runtime's",
    "In ONNX Runtime's order of preference (MLAS",
]


def named_lines() -> list[tuple[str, str]]:
    """Each line outside the folders of backends that names a runtime, with its file."""
    return [
        (path.relative_to(PACKAGE).as_posix(), line.strip())
        for path in sorted(PACKAGE.rglob("*.py"))
        if len(path.relative_to(PACKAGE).parts) < 3 or path.relative_to(PACKAGE).parts[0] != "backends"
        for line in path.read_text(encoding="utf-8").splitlines()
        if NAMED.search(line)
    ]


def test_only_backends_name_a_runtime():
    allowed = {(file, text) for file, text, _ in ALLOWED}
    left = [
        f"{file}: {line}"
        for file, line in named_lines()
        if not any(file == one and text in line for one, text in allowed)
        and not any(text in line for text in OBSERVED)
    ]
    assert not left, "\n".join(
        [
            "declare it in the backend's folder (qdqspec/_core/config/hooks.py), or write what any backend does:",
            *left,
        ]
    )


@pytest.mark.parametrize(
    ("file", "text", "why"), ALLOWED, ids=[f"{file}: {text}" for file, text, _ in ALLOWED]
)
def test_each_exception_is_one_line(file, text, why):
    assert why
    counts = Counter(file == one and text in line for one, line in named_lines())
    assert counts[True] == 1


@pytest.mark.parametrize("text", OBSERVED)
def test_each_observation_is_one_line(text):
    assert sum(text in line for _, line in named_lines()) == 1


def test_the_pattern_matches_names_of_all_runtimes():
    assert {"onnxruntime", "onnxruntime-web", "openvino", "tensorrt", "trtexec"} <= set(RUNTIMES)
    assert all(
        map(NAMED.search, ["import onnxruntime_web", "as TensorRT does", "openvino-cpu", "on ONNX Runtime"])
    )
