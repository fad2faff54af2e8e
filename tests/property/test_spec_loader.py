"""Any values in Python are a spec or raise one `SpecError`; `test_readers` has the files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qdqspec.errors import SpecError
from qdqspec.spec.models import Spec

# Fragments with a meaning in YAML or in a spec, in addition to any characters.
FRAGMENTS = (
    *"{}[]:,-?&*!|>'\"%@`#~=<\n\t \r\x85\u2028\ufeff\x00\ud7ff", "---\n", "...\n", "!!python/object:os.system ",
    "&a ", "*a", "*first", "<<: *first", "? ", "%YAML 1.1\n", "null", "true", ".nan", "-.inf", "1e400", "0x", "0b",
    "9" * 50, "1_0", "''", '"\\ud800"', '"\\UFFFFFFFF"', "kind: latency", "checks:", "checks: []", "qdqspec: 1\n",
    "model: ../../x", "matrix: {}", "include: [{}]", "10m", "1.5 h", "5%", "NaN", "allow_file: .", "deny_file: a.txt",
    "id: latency", "[" * 60, "\n" + " " * 8,
)  # fmt: skip

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(FRAGMENTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(sorted(Spec.model_fields)),
    VALUES,
    st.sampled_from(["kind", "min", "max_ms", "id", "severity"]),
    VALUES,
)
def test_any_value_in_python_is_a_spec_or_raises_a_spec_error(
    key: str, value: object, check_key: str, check_value: object
) -> None:
    keys = {
        "model": "m.onnx",
        "checks": [{"kind": "speedup", "min": 1.1, check_key: check_value}],
        key: value,
    }
    try:
        cases = Spec(**keys).cases()  # type: ignore[arg-type]  # values of any type on purpose
    except SpecError as error:
        cases = (error,)
    assert cases
