r"""Maps a TensorRT layer to the ONNX nodes it was built from.

From 10 on a layer's metadata lists them; before that only its name does. Names are joined, wrapped
and numbered (`a + b`, `a || b`, `PWN(PWN(a), b)`, `{ForeignNode[a...b]}`, `a_clone_1`, `a_myl4_0`), so
they are looked up in the model if there is one: a name that the model contains is never split.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from qdqspec.graph.model import QDQ_OPS, Model

_PREFIX = "[ONNX Layer: "
# Between layers fused by Cask and inside Myelin; if a terminal removed both, entries are adjacent.
_SEPARATORS = re.compile(r"[\x1e\x1f]|(?<=\])(?=\[ONNX Layer: )")
_FOREIGN = re.compile(r"\{ForeignNode\[((?:(?!\{ForeignNode\[).)*?)\]\}")
_JOINTS = re.compile(r" \+ | \|\| ")
_PROFILE = re.compile(r" \[profile \d+\]$")
_CLONE = re.compile(r"_clone_\d+$")
_MYELIN = re.compile(r"_myl\d+_\d+$")
_COUNTED = re.compile(r"_\d+$")
_INSERTED = re.compile(
    r"^(?:\(Unnamed Layer\*|__my|Reformatting CopyNode |copied_|(?:un)?squeeze_|reshape_(?:before|after)_|ONNXTRT_)"
)
_PAIR = re.compile(r"(de)?quant(?:ize)?_?linear", re.IGNORECASE)
_DEEPEST = 64  # depth of nested pointwise fusions that are split
_INNER_TENSOR = re.compile(r"^Reformatted (?:In|Out)put Tensor |^__my|_myl\d+$|^\(Unnamed Layer\*|^l2_cache_")


def plain_name(name: str) -> str:
    """A layer's name without the optimization profile it was built for."""
    return _PROFILE.sub("", name)


def metadata_names(metadata: str) -> tuple[str, ...]:
    """The node names in a layer's metadata, pairs included, each once. A name may contain a bracket."""
    entries = _SEPARATORS.split(metadata)
    names = (entry[len(_PREFIX) :].removesuffix("]") for entry in entries if entry.startswith(_PREFIX))
    return tuple(dict.fromkeys(name for name in names if name))


class EngineNames:
    """Finds nodes and tensors, in a model if there is one, else by the syntax of names."""

    def __init__(self, model: Model | None = None) -> None:
        self._model = model
        self._ops: dict[str, str] = {}
        self._called: dict[str, str] = {}  # TensorRT's name of a node: the model's
        self._base: dict[str, str] = {}
        self._tensors: set[str] = set()
        for node in model.nodes if model else ():
            self._ops[node.name] = node.op_type
            self._called[node.name] = node.name
            if not node.proto.name and node.outputs:  # the parser names it after its first output
                self._called.setdefault(node.outputs[0], node.name)
            self._tensors.update(t for t in (*node.inputs, *node.outputs) if t)
            if node.op_type in QDQ_OPS:
                self._base[node.outputs[0]] = self.base(node.inputs[0])

    def base(self, tensor: str) -> str:
        """The tensor before its pairs."""
        return self._base.get(tensor, tensor)

    def of_layer(self, name: str, metadata: str) -> tuple[str, ...]:
        """Every node of a layer, pairs included: from its metadata, else from its own name."""
        told = metadata_names(metadata)
        if told:
            known = (self._called.get(entry) for entry in told)
            return tuple(node for node in known if node) if self._model else told
        return tuple(dict.fromkeys(self._from_name(_CLONE.sub("", plain_name(name)))))

    def is_pair(self, node: str) -> bool:
        """Whether a node quantizes or dequantizes."""
        return self._ops[node] in QDQ_OPS if node in self._ops else bool(_PAIR.search(node))

    def tensors(self, names: Iterable[str]) -> tuple[str, ...]:
        """Those of a layer's tensors that the model contains, before their pairs."""
        if self._model:
            found: Iterable[str] = (self.base(name) for name in names if name in self._tensors)
        else:
            found = (name for name in names if name and not _INNER_TENSOR.search(name))
        return tuple(dict.fromkeys(found))

    def _from_name(self, name: str) -> Iterator[str]:
        if name in self._called:
            yield self._called[name]
            return
        for found in _FOREIGN.finditer(name):
            yield from self._between(*found[1].partition("...")[::2])
        yield from self._of_parts(_FOREIGN.sub("", name))

    def _between(self, first: str, last: str) -> Iterator[str]:
        """All nodes from the first to the last of a foreign node; without a model only these two."""
        ends = [node for end in (first, last) for node in self._of_parts(end)]
        if self._model is None or len(ends) < 2:
            yield from ends
            return
        yield from nodes_between(self._model, ends[0], ends[-1])

    def _of_parts(self, name: str) -> Iterator[str]:
        parts = [part for part in _JOINTS.split(name) if part]
        start = 0
        while start < len(parts):
            stop, node = self._longest(parts, start)
            if node:
                yield node
            elif self._model is None:
                following = parts[start + 1] if start + 1 < len(parts) else ""
                yield from self._guessed(parts[start], following)
            else:
                yield from self._looked_up(parts[start])
            start = stop

    def _longest(self, parts: list[str], start: int) -> tuple[int, str]:
        """The longest sequence of parts that is one node's name, since ONNX names may contain a plus sign."""
        for stop in range(min(len(parts), start + 4), start, -1):
            node = self._called.get(" + ".join(parts[start:stop]))
            if node:
                return stop, node
        return start + 1, ""

    def _looked_up(self, part: str) -> Iterator[str]:
        inner = _unwrapped(part)
        if inner != [part]:
            for name in inner:
                yield from self._from_name(name)
            return
        bare = _MYELIN.sub("", _CLONE.sub("", part))
        for name in (part, bare, _COUNTED.sub("", bare)):
            if name in self._called:
                yield self._called[name]
                return

    def _guessed(self, part: str, following: str) -> Iterator[str]:
        """Nodes by syntax: a part before a Q is the weight it quantizes; inserted layers belong to no node."""
        inner = _unwrapped(part)
        if inner != [part]:
            for name in inner:
                yield from self._guessed(name, "")
        elif not _INSERTED.search(part) and not part.endswith((".weight", ".bias")):
            is_weight = _PAIR.search(following) and not _PAIR.search(part)
            if not is_weight:
                yield _MYELIN.sub("", _CLONE.sub("", part))


def nodes_between(model: Model, first: str, last: str) -> tuple[str, ...]:
    """Nodes on a path from one to the other, both included, in graph order."""
    after: set[str] = {first}
    order = [node for node in model.nodes if first == node.name or node.inputs]
    made = set(model.by_name[first].outputs)
    for node in order:
        if made.intersection(node.inputs):
            after.add(node.name)
            made.update(node.outputs)
    before, wanted = {last}, set(model.by_name[last].inputs)
    for node in reversed(order):
        if wanted.intersection(node.outputs):
            before.add(node.name)
            wanted.update(node.inputs)
    on_path = after & before
    return tuple(n.name for n in model.nodes if n.name in on_path) or (first, last)


def _unwrapped(part: str) -> list[str]:
    """The arguments of a pointwise fusion; any other text unchanged."""
    if not (part.startswith("PWN(") and part.endswith(")")) or part.count("PWN(") > _DEEPEST:
        return [part]
    depth, start, found = 0, 4, []
    for index in range(4, len(part) - 1):
        depth += {"(": 1, ")": -1}.get(part[index], 0)
        if depth == 0 and part.startswith(", ", index):
            found.append(part[start:index])
            start = index + 2
    return [*found, part[start:-1]]
