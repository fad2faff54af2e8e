"""Odd models with bodies, local functions, and operators of other domains."""

from __future__ import annotations

from odd.written import DENSE, odd


def _deep_bodies() -> str:
    """Nested bodies, deeper than any exporter writes."""
    inner = "a0 = MatMul(h, v)"
    for level in range(1, 13):
        inner = (
            f"a{level} = If(yes) <then_branch = t{level} () => (float[1, 8] a{level - 1}) {{ {inner} }}, "
            f"else_branch = e{level} () => (float[1, 8] b{level}) {{ b{level} = Relu(h) }}>"
        )
    return f"net (float[1, 8] x) => (float[1, 8] a12) <bool yes = {{1}}> {{ h = MatMul(x, w)\n {inner} }}"


BODIES = (
    odd(
        "if",
        "MatMul in a branch of If",
        """net (float[1, 8] x) => (float[1, 8] y) <bool yes = {1}> {
            h = MatMul(x, w)
            y = If(yes) <
                then_branch = then () => (float[1, 8] a) { a = MatMul(h, v) },
                else_branch = other () => (float[1, 8] b) { b = Relu(h) }
            >
        }""",
        DENSE,
    ),
    odd(
        "loop",
        "MatMul in the body of Loop",
        """net (float[1, 8] x) => (float[1, 8] y) <int64 three = {3}, bool yes = {1}> {
            h = MatMul(x, w)
            y = Loop(three, yes, h) <
                body = turn (int64 i, bool go_on, float[1, 8] state) => (bool goes_on, float[1, 8] next) {
                    goes_on = Identity(go_on)
                    next = MatMul(state, v)
                }
            >
        }""",
        DENSE,
    ),
    odd(
        "scan",
        "MatMul in the body of Scan, which reads outer weights",
        """net (float[3, 8] x) => (float[1, 8] last, float[3, 1, 8] y) {
            h = MatMul(x, w)
            start = MatMul(rows, v)
            last, y = Scan <num_scan_inputs = 1,
                body = turn (float[1, 8] state, float[8] row) => (float[1, 8] next, float[1, 8] seen) {
                    sum = Add(state, row)
                    next = MatMul(sum, v)
                    seen = Identity(next)
                }
            >(start, h)
        }""",
        {**DENSE, "rows": (1, 8)},
    ),
    odd("bodies-in-bodies", "twelve Ifs in one another", _deep_bodies(), DENSE),
    odd(
        "local-function",
        "a function with an attribute",
        """net (float[1, 8] x) => (float[1, 8] y) {
            h = MatMul(x, w)
            s = mine.Twice <gain = 2.0> (h)
            y = MatMul(s, v)
        }
        <domain: "mine", opset_import: ["" : 17]>
        Twice <gain> (a) => (b) {
            g = Constant <value_float: float = @gain> ()
            c = Mul(a, g)
            b = Relu(c)
        }""",
        DENSE,
    ),
    odd(
        "custom-operator",
        "an operator of an unknown domain",
        """net (float[1, 8] x) => (float[1, 8] y) {
            h = MatMul(x, w)
            c = acme.Secret <strength = 3> (h)
            y = MatMul(c, v)
        }""",
        DENSE,
        refused="acme",
    ),
)
