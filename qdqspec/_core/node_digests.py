"""Digests of a model's nodes and constants as one short text, and the difference between two such texts.

Two hashes of models show only that the models differ. These digests are stored beside the hash, where the model itself
is not at hand later: in baselines, run records and journals. The text of 20,000 nodes has about 180 KB.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from qdqspec._core.units import count_text, plain

_LARGEST = 64 << 20  # bytes of the decompressed text
_SHOWN = 5  # nodes that a message names
_NUMBERED = re.compile(r"(?:^|/)[^/]*#\d+$")  # a node without a name of its own
_KINDS = {"input": "type", "operator set": "version"}


@dataclass(frozen=True, slots=True)
class NodeDigest:
    """A node, or an input, output or operator set of the model.

    ``sources``: for each input its producer, as the number of rows before this one and an output (``3``, ``3.1``), or
    the digest of a constant (``=1f09ab``), or nothing.
    """

    name: str
    op_type: str
    attributes: str
    sources: tuple[str, ...]

    @property
    def constants(self) -> tuple[str, ...]:
        """The digests of constants by input; empty for other inputs."""
        return tuple(source if source.startswith("=") else "" for source in self.sources)

    def __str__(self) -> str:
        return f"{plain(self.op_type, 40)} '{plain(self.name, 60)}'"


def pack(rows: Iterable[NodeDigest]) -> str:
    """The rows as a text for JSON: compressed, and the same for the same rows."""
    lists = [[row.name, row.op_type, row.attributes, *row.sources] for row in rows]
    return base64.b85encode(zlib.compress(json.dumps(lists, separators=(",", ":")).encode(), 9)).decode()


def _unpack(text: str) -> tuple[NodeDigest, ...]:
    """The inverse of `pack`; no rows for an empty or damaged text, which is not trusted."""
    try:
        unzipped = zlib.decompressobj().decompress(base64.b85decode(text), _LARGEST)
        return tuple(
            NodeDigest(str(name), str(op_type), str(attributes), tuple(map(str, sources)))
            for name, op_type, attributes, *sources in json.loads(unzipped)
        )
    except (ValueError, TypeError, zlib.error, RecursionError):
        return ()


def changes_text(before: str, after: str) -> str:
    """The difference between two models: ``2 nodes changed: Conv 'a' (weights), + Relu 'b'; 1 constant changed``.

    Empty if one of the digests is missing.
    """
    old, new = _unpack(before), _unpack(after)
    return _Difference(old, new).text if old and new else ""


class _Difference:
    def __init__(self, old: Sequence[NodeDigest], new: Sequence[NodeDigest]) -> None:
        self._old, self._new = old, new

    @cached_property
    def _pairs(self) -> dict[int, int]:
        """Rows of the new model and the same rows of the old one: by name, then by order of equal operators."""
        named = {(row.op_type, row.name): number for number, row in enumerate(self._old)}
        pairs = {
            number: named[row.op_type, row.name]
            for number, row in enumerate(self._new)
            if (row.op_type, row.name) in named and not _NUMBERED.search(row.name)
        }
        taken = set(pairs.values())
        left = [number for number in range(len(self._old)) if number not in taken]
        right = [number for number in range(len(self._new)) if number not in pairs]
        keys = [
            [(row.op_type, row.attributes, row.constants) for row in rows] for rows in (self._old, self._new)
        ]
        matcher = SequenceMatcher(None, [keys[0][n] for n in left], [keys[1][n] for n in right])
        for word, start, end, first, last in matcher.get_opcodes():
            if word == "equal":
                pairs.update(zip(right[first:last], left[start:end], strict=True))
            elif word == "replace":
                pairs.update(self._match_replaced(left[start:end], right[first:last]))
        return pairs

    def _match_replaced(self, left: Sequence[int], right: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Rows of one operator in order, at a place where other rows are not equal."""
        open_rows = list(left)
        for number in right:
            same = (n for n in open_rows if self._old[n].op_type == self._new[number].op_type)
            if (found := next(same, None)) is not None:
                open_rows.remove(found)
                yield number, found

    @cached_property
    def _kept(self) -> frozenset[int]:
        return frozenset(self._pairs.values())

    def _find_reasons(self, number: int) -> Iterator[str]:
        """The parts of a node that changed. Inputs from added or removed nodes follow from these."""
        old, new = self._old[self._pairs[number]], self._new[number]
        if old.attributes != new.attributes:
            yield _KINDS.get(new.op_type, "attributes")
        if old.constants != new.constants:
            yield "weights"
        before = [_find_producer(self._pairs[number], source) for source in old.sources]
        after = [_find_producer(number, source) for source in new.sources]
        moved = (
            (was is None) != (now is None)
            if was is None or now is None
            else was[0] in self._kept and now[0] in self._pairs and was != (self._pairs[now[0]], now[1])
            for was, now in zip(before, after, strict=False)
        )
        if len(before) != len(after) or (old.constants == new.constants and any(moved)):
            yield "inputs"

    @cached_property
    def text(self) -> str:
        changed = {
            number: reasons
            for number in sorted(self._pairs)
            if (reasons := ", ".join(self._find_reasons(number)))
        }
        names = [f"{self._new[number]} ({reasons})" for number, reasons in changed.items()]
        names += [f"+ {row}" for number, row in enumerate(self._new) if number not in self._pairs]
        names += [f"- {row}" for number, row in enumerate(self._old) if number not in self._kept]
        both = [(self._old[old].name, self._new[new].name) for new, old in self._pairs.items()]
        renamed = sum(before != name and not _NUMBERED.search(name) for before, name in both)
        parts = []
        if names:
            more = f", and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
            parts.append(f"{count_text(len(names), 'node')} changed: {', '.join(names[:_SHOWN])}{more}")
        # a constant that several nodes read counts once
        values = (
            change
            for new, old in self._pairs.items()
            for change in zip(self._old[old].constants, self._new[new].constants, strict=False)
        )
        if constants := len({(before, now) for before, now in values if before != now}):
            parts.append(f"{count_text(constants, 'constant')} changed")
        if renamed:
            parts.append(f"{count_text(renamed, 'node')} renamed")
        same = "nodes and constants are the same: other names of tensors, or other metadata"
        return "; ".join(parts) or same


def _find_producer(number: int, source: str) -> tuple[int, str] | None:
    """The row that makes an input, and its output; ``None`` for a constant or an omitted input."""
    distance, _, output = source.partition(".")
    return (number - int(distance), output) if distance.isdecimal() else None
