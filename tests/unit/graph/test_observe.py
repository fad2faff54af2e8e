"""Inner tensors as outputs: those of bodies in all iterations, without elements if a branch is not executed."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_text import outputs_of, parsed

from qdqspec.graph.observe import with_outputs

X = np.array([[1.0, -2.0], [3.0, -4.0]], np.float32)


def seen(text: str, tensors: str, **feeds: object) -> dict[str, list[float]]:
    observer = with_outputs(parsed(f"g {text}"), tensors.split())
    proto = observer.proto
    names = [output.name for output in proto.graph.output]
    found = observer.seen(dict(zip(names, outputs_of(proto, feeds), strict=True)))
    assert {value.dtype for value in found.values()} == {np.dtype(np.float32)}
    return {name: value.tolist() for name, value in found.items()}


BRANCHES = """(float[n,2] x, bool c) => (float[n,2] y) {
  [gate] z = If (c) <
    then_branch = yes () => (float[n,2] t) { u = Neg(x)  t = Relu(u) },
    else_branch = no () => (float[n,2] e) { u = Abs(x)  e = Identity(u) }
  >
  y = Tanh(z)
}"""


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_that_is_not_executed_gives_no_elements(taken: bool) -> None:
    tensors = "gate/then_branch/u gate/else_branch/u t z"
    found = seen(BRANCHES, tensors, x=X, c=taken)
    yes = [[-1.0, 2.0, -3.0, 4.0], [], [0.0, 2.0, 0.0, 4.0]]
    no = [[], [1.0, 2.0, 3.0, 4.0], []]
    assert [found[name] for name in tensors.split()[:3]] == (yes if taken else no)
    assert np.shape(found["z"]) == X.shape  # of the main graph, unchanged
    half = seen(BRANCHES.replace("float[n,2]", "float16[n,2]"), "t", x=X.astype(np.float16), c=taken)
    assert half == {"t": yes[2] if taken else []}


LOOP = """(float[n,2] x, int64 k, bool c) => (float[n,2] y) {
  [loop] y, s = Loop (k, c, x) <
    body = b (int64 i, bool more, float[n,2] v) => (on, w, w2) {
      on = Identity(more)  d = Add(v, v)  w = Identity(d)  w2 = Neg(d)
    }
  >
}"""


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_loop_gives_all_iterations(times: int) -> None:
    found = seen(LOOP, "d v", x=X[:1], k=np.int64(times), c=True)
    assert found["d"] == [value * 2**i for i in range(1, times + 1) for value in (1.0, -2.0)]
    assert found["v"] == [value * 2**i for i in range(times) for value in (1.0, -2.0)]


def test_an_if_inside_a_loop_gives_the_iterations_that_executed_the_branch() -> None:
    text = """(float[2] x, int64 k, bool c) => (float[2] y) {
      [loop] y = Loop (k, c, x) < body = b (int64 i, bool more, float[2] v) => (on, w) {
          on = Identity(more)  two = Constant<value_int: int = 2>()  odd = Mod(i, two)  is_odd = Cast<to = 9>(odd)
          [gate] w = If (is_odd) <
            then_branch = yes () => (t) { t = Neg(v) }, else_branch = no () => (e) { e = Add(v, v) } > } > }"""
    found = seen(text, "t e", x=np.ones(2, np.float32), k=np.int64(4), c=True)
    assert found == {"e": [2.0, 2.0, -4.0, -4.0], "t": [-2.0, -2.0, 4.0, 4.0]}


SCAN = """(float[2] h, float[n,2] x) => (float[2] y, float[n,2] z) {{
  [scan] y, z = Scan <num_scan_inputs = 1, body = b (float[2] s, float[2] r) => (s2, o) {{
    a = Add(s, r)  s2 = Identity(a)  {more}
  }}> (h, x)
}}"""


SUMS = [1.0, -2.0, 4.0, -6.0]
VARYING = """total = ReduceSum<keepdims = 0>(r)  zero = Constant<value_float: float = 0.0>()  up = Greater(total, zero)
  [gate] o = If (up) < then_branch = yes () => (t) { t = Add(r, r) }, else_branch = no () => (e) { e = Neg(r) } >"""


@pytest.mark.parametrize(
    ("more", "tensors", "expected"),
    [
        ("o = Neg(a)", "a r o", {"a": SUMS, "r": [1.0, -2.0, 3.0, -4.0], "o": [-1.0, 2.0, -4.0, 6.0]}),
        (VARYING, "t e a", {"a": SUMS}),
    ],
    ids=["all steps", "an If whose size differs from step to step is skipped"],
)
def test_a_scan_gives_all_steps(more: str, tensors: str, expected: dict[str, list[float]]) -> None:
    assert seen(SCAN.format(more=more), tensors, h=np.zeros(2, np.float32), x=X) == expected
