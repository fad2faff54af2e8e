"""Digests of a model's nodes and constants as one short text, and the difference between two such texts.

Two hashes of models show only that the models differ. These digests are stored beside the hash, where the model itself
is not at hand later: in baselines, run records and journals. The text of 20,000 nodes has about 180 KB.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from qdqspec._core.units import count_text, plain

_LARGEST = 64 << 20  # bytes of the decompressed text
_Key: TypeAlias = tuple[str, str]  # operator and name, by which rows of two models are compared


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
    def key(self) -> _Key:
        """The operator and the name."""
        return self.op_type, self.name

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
    models = _unpack(before), _unpack(after)
    if not all(models):
        return ""
    old, new = ({row.key: row for row in rows} for rows in models)
    both = old.keys() & new.keys()
    makers = [_find_makers(rows) for rows in models]
    names, values = [], set()
    for key in (key for key in new if key in both):
        was, now = old[key], new[key]
        kinds = {"input": "type", "operator set": "version"}
        reasons = [kinds.get(now.op_type, "attributes")] if was.attributes != now.attributes else []
        if was.constants != now.constants:
            reasons.append("weights")
            values |= set(zip(was.constants, now.constants, strict=False))
        # inputs from added or removed nodes follow from these
        ends = [pair for pair in zip(makers[0][key], makers[1][key], strict=False) if pair[0] != pair[1]]
        is_moved = any(all(end is None or end[0] in both for end in pair) for pair in ends)
        if len(was.sources) != len(now.sources) or (is_moved and was.constants == now.constants):
            reasons.append("inputs")
        names += [f"{now} ({', '.join(reasons)})"] if reasons else []
    names += [f"+ {row}" for key, row in new.items() if key not in both]
    names += [f"- {row}" for key, row in old.items() if key not in both]
    parts = []
    if names:
        more = f", and {len(names) - 5:,} more" if len(names) > 5 else ""
        parts.append(f"{count_text(len(names), 'node')} changed: {', '.join(names[:5])}{more}")
    # a constant that several nodes read counts once
    if constants := sum(was != now for was, now in values):
        parts.append(f"{count_text(constants, 'constant')} changed")
    same = "nodes and constants are the same: other names of tensors, or other metadata"
    return "; ".join(parts) or same


def _find_makers(rows: Sequence[NodeDigest]) -> dict[_Key, list[tuple[_Key, str] | None]]:
    """For each row and each of its inputs, the row that makes it and the output; ``None`` for a constant."""
    makers = {}
    for number, row in enumerate(rows):
        found: list[tuple[_Key, str] | None] = []
        for source in row.sources:
            distance, _, output = source.partition(".")
            is_made = distance.isdecimal() and int(distance) <= number
            found.append((rows[number - int(distance)].key, output) if is_made else None)
        makers[row.key] = found
    return makers
