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
# Where a text refers to a node or a tensor: 'x', constant (x), tensor x.
_POINTED = re.compile(
    r"'([^']+)'|\b(?:constant|layer|node|operation|tensor) \(?([^\s(),']+?)\.?(?=[\s(),']|$)"
)
_ADDED = re.compile(
    r"(\.\d+)?(_myl\d+(_\d+)?)?$"
)  # by compilers to names of tensors and layers: x.1, x_myl0_3


def named_node(model: Model, text: str) -> str:
    """The node of a model that a message names, itself or by a tensor that it makes or reads; empty if there is none.

    A name is in quotes, in brackets, after ``name:`` or after a word such as ``node``. A runtime names a node of a body
    without the path of the body.
    """
    known = {name.rpartition("/")[2]: name for name in model.by_name} | {name: name for name in model.by_name}
    words = [word.strip() for pattern in (_AFTER_NAME, _ENCLOSED) for word in pattern.findall(text)]
    pointed = [match[1] or match[2] for match in _POINTED.finditer(text)]
    pointed += [_ADDED.sub("", word) for word in pointed]
    nodes = [known[word] for word in (*words, *pointed) if word in known]
    makers = [model.producer[word].name for word in pointed if word in model.producer]
    readers = [model.consumers[word][0].node for word in pointed if model.consumers.get(word)]
    return max(nodes, key=len, default="") or next(iter(makers + readers), "")


def with_refusals(found: Iterable[Finding], refusals: Iterable[Finding]) -> tuple[Finding, ...]:
    """Findings of static rules, and refusals of nodes that no earlier one refuses; the refused ones first."""
    every = list(found)
    for refusal in refusals:
        known = {finding.node for finding in every if finding.severity == "refused"}
        if not refusal.node or refusal.node not in known:
            every.append(refusal)
    order = ("refused", "slow", "note")
    return tuple(sorted(every, key=lambda finding: order.index(finding.severity)))
