"""Findings that no static rule makes: what ONNX's checker and a runtime refuse, and the ids of these findings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial

from qdqspec.graph.model import Model
from qdqspec.types import Finding

_refusal = partial(Finding, severity="refused", node="", message="")
CHECKER = _refusal(
    id="ONX001",
    title="ONNX's checker refuses the model: types or shapes contradict each other",
    cure="convert the node's inputs to one type, or export the model again",
    source="onnx.checker.check_model with full_check; a note where the runtime of the target loaded the model",
)
LOAD = _refusal(
    id="RUN001",
    title="The runtime does not load the model",
    cure="change the node that the message names, or leave it in float",
    source="runtime: one load by the installed version",
)
RUN = _refusal(
    id="RUN002",
    title="The runtime loads the model, and cannot run it with its optimizations",
    cure="leave the nodes around the one that fails in float, or run the model without the runtime's optimizations",
    source="runtime: one run by the installed version, which succeeds without optimizations",
)
VALUES = _refusal(
    id="RUN003",
    title="The runtime computes other values with its optimizations than ONNX defines",
    cure="leave the node in float, change it, or run the model without the runtime's optimizations",
    source="runtime: one run by the installed version, below 20 dB of a run without optimizations",
)
BY_LOADING = (CHECKER, LOAD, RUN, VALUES)

_AFTER_NAME = re.compile(r"""name:\s*['"]?([^'"(),]+)""")
_ENCLOSED = re.compile(r"""['"(]([^'"()]+)['")]""")


def named_node(model: Model, text: str) -> str:
    """The node of a model that a message names in quotes, in brackets or after ``name:``; empty if there is none.

    A runtime names a node of a body without the path of the body.
    """
    known = {name.rpartition("/")[2]: name for name in model.by_name} | {name: name for name in model.by_name}
    words = [word.strip() for pattern in (_AFTER_NAME, _ENCLOSED) for word in pattern.findall(text)]
    return max((known[word] for word in words if word in known), key=len, default="")


def with_refusals(found: Iterable[Finding], refusals: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings of static rules, and refusals of nodes that no earlier one refuses; the refused ones first."""
    every = list(found)
    for refusal in refusals:
        known = {finding.node for finding in every if finding.severity == "refused"}
        if not refusal.node or refusal.node not in known:
            every.append(refusal)
    order = ("refused", "slow", "note")
    return tuple(sorted(every, key=lambda finding: order.index(finding.severity)))
