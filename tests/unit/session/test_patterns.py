"""Invalid patterns are reported together, with their positions in the spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqspec import load_spec
from qdqspec.app.preparation.prepare import require_patterns
from qdqspec.errors import SpecError

SPEC = """\
qdqspec: 1
model: m.onnx
patterns:
  allow: ["Conv > Relu", "Cnov > Relu"]
  deny: [softmax, "Conv > (Relu"]
checks: [{kind: speedup, min: 1}]
"""


def error_of(text: str, folder: Path) -> SpecError:
    path = folder / "a.qdq.yaml"
    path.write_text(text, encoding="utf-8")
    (case,) = load_spec(path).cases()
    with pytest.raises(SpecError) as caught:
        require_patterns(case)
    return caught.value


def test_all_invalid_patterns_are_reported_each_with_a_caret(tmp_path: Path) -> None:
    error = error_of(SPEC, tmp_path)
    assert [problem[:2] for problem in error.problems] == [(4, 27), (5, 10), (5, 27)]
    lines = str(error).splitlines()
    assert "a.qdq.yaml:4:27: unknown operator 'Cnov' (did you mean 'Conv'?)" in lines[0]
    assert lines[3].index("^") == lines[2].index("Cnov")
    assert "did you mean 'Softmax'?" in str(error)
    escaped = error_of(SPEC.replace('"Cnov > Relu"', '"Cn\\u006fv > Relu"'), tmp_path)
    assert "unknown operator 'Cnov'" in str(escaped)
