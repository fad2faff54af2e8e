"""Matches the nodes of two exports of one network, to compare their layers.

An exporter renumbers nodes for each Q/DQ placement (``Conv_5`` and ``Conv_34`` are the same node in the
recorded ResNet-18 quartet), so where names differ, nodes are matched by operator and order.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

_NUMBERED = re.compile(r"(?P<op>[A-Za-z][A-Za-z]*?)_?(?P<number>\d+)$")
_WORD = re.compile(r"[A-Za-z]+")
# operators that fusion may remove from names
_ABSORBED = frozenset({"Relu", "Clip", "Identity", "Dropout", "Flatten", "Reshape"})
_ENOUGH = 0.5  # share of common names above which nodes are matched by name
_LARGEST = 3000  # nodes; above this, matching by order takes too long and is unreliable


def nodes_text(nodes: Sequence[str]) -> str:
    """The nodes of one kernel; those after the first without the scope that they share with it.

    ``/layer2/conv1/Conv + Relu`` for ``/layer2/conv1/Conv`` and ``/layer2/Relu``.
    """
    first, *others = nodes or ("",)
    scopes = first.split("/")[:-1]
    return " + ".join((first, *(_without(scopes, node.split("/")) for node in others)))


def _without(scopes: Sequence[str], parts: Sequence[str]) -> str:
    same = 0
    while same < min(len(scopes), len(parts) - 1) and scopes[same] == parts[same]:
        same += 1
    return "/".join(parts[same:] if same > 1 or not parts[0] else parts)


def op_of(node: str, ops: Mapping[str, str] | None = None) -> str:
    """A node's operator: from ``ops``, else from its name (``Conv_5``, ``/layer1/conv1/Conv``, ``Conv#3``)."""
    if ops and node in ops:
        return ops[node]
    last = node.rsplit("/", 1)[-1].partition("#")[0]
    numbered = _NUMBERED.match(last)
    found = _WORD.search(numbered["op"] if numbered else last)
    return found[0] if found else last


def same_nodes(reference: Sequence[str], tuned: Sequence[str]) -> dict[str, str]:
    """Names in ``reference`` of the nodes of ``tuned`` that have other names there."""
    common = set(reference) & set(tuned)
    smaller = min(len(set(reference)), len(set(tuned)))
    if not smaller or len(common) >= _ENOUGH * smaller or max(len(reference), len(tuned)) > _LARGEST:
        return {}
    left, right = _in_order(reference), _in_order(tuned)
    found = _by_operator(left, right)
    return found | _followers(left, right, found)


def _in_order(nodes: Sequence[str]) -> list[str]:
    """Nodes sorted by the exporter's numbers if all have one: a runtime executes branches in any order."""
    distinct = list(dict.fromkeys(nodes))
    numbers = [_NUMBERED.search(node) for node in distinct]
    if not all(numbers):
        return distinct
    keyed = [
        (int(number["number"][:12]), node) for number, node in zip(numbers, distinct, strict=True) if number
    ]
    return [node for _, node in sorted(keyed)]


def _by_operator(left: list[str], right: list[str]) -> dict[str, str]:
    ours = [node for node in left if op_of(node) not in _ABSORBED]
    theirs = [node for node in right if op_of(node) not in _ABSORBED]
    matcher = SequenceMatcher(None, [op_of(n) for n in ours], [op_of(n) for n in theirs], autojunk=False)
    return {
        theirs[block.b + offset]: ours[block.a + offset]
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def _followers(left: list[str], right: list[str], found: Mapping[str, str]) -> dict[str, str]:
    """Match activations by the node before them."""
    after = dict(itertools.pairwise(left))
    more = {}
    for node, follower in itertools.pairwise(right):
        candidate = after.get(found.get(node, ""), "")
        if follower not in found and candidate and op_of(candidate) == op_of(follower):
            more[follower] = candidate
    return more
