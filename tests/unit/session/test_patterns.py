"""Invalid patterns are reported together, with their positions in the spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from qdqspec import load_spec
from qdqspec.app.preparation.prepare import require_patterns
from qdqspec.errors import PatternError, SpecError
from qdqspec.types import Case

SPEC = """\
qdqspec: 1
model: m.onnx
patterns:
  allow: ["Conv > Relu", "Cnov > Relu"]
  deny: [softmax, "Conv > (Relu"]
checks: [{kind: speedup, min: 1}]
"""


def case_of(text: str, folder: Path) -> Case:
    path = folder / "a.qdq.yaml"
    path.write_text(text, encoding="utf-8")
    (case,) = load_spec(path).cases()
    return case


def test_all_invalid_patterns_are_reported_each_with_a_caret(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        require_patterns(case_of(SPEC, tmp_path))
    assert [problem[:2] for problem in caught.value.problems] == [(4, 27), (5, 10), (5, 27)]
    lines = str(caught.value).splitlines()
    assert (
        "a.qdq.yaml:4:27: unknown operator 'Cnov' (did you mean 'Conv'?), in the pattern 'Cnov > Relu'"
        in lines[0]
    )
    assert lines[3].index("^") == lines[2].index("Cnov")
    assert "did you mean 'Softmax'?" in str(caught.value)


def test_the_error_of_a_pattern_with_yaml_escapes_has_a_caret(tmp_path: Path) -> None:
    text = SPEC.replace('"Cnov > Relu"', '"Cn\\u006fv > Relu"')
    with pytest.raises(PatternError, match="unknown operator 'Cnov'"):
        require_patterns(case_of(text, tmp_path))
