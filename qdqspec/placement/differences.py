"""Renders a `QdqDiff` as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator

from qdqspec.placement.diff import PairDiff, PairFacts, QdqDiff, percent_range
from qdqspec.placement.skeleton import SkeletonDiff
from qdqspec.units import count_text, list_text, plain

SCHEMA_VERSION = 1

_KINDS = {
    "nodes only in the second": "added",
    "nodes only in the first": "removed",
    "nodes that differ": "changed",
    "constants that differ": "constants",
    "interface": "interface",
}


def to_json(diff: QdqDiff) -> dict[str, object]:
    """All differences, never truncated."""
    return {
        "schema_version": SCHEMA_VERSION,
        "same": diff.same,
        "equal_pairs": diff.equal,
        "added": [dataclasses.asdict(pair) for pair in diff.added],
        "removed": [dataclasses.asdict(pair) for pair in diff.removed],
        "changed": [dataclasses.asdict(pair) for pair in diff.changed],
        "skeleton": {"same": not diff.skeleton.differs, **dataclasses.asdict(diff.skeleton)},
    }


def render_text(diff: QdqDiff, *, most: int | None = 12) -> str:
    """The differences as text: a summary first, then each difference, ``most`` of a kind."""
    lines = [_headline(diff)]
    lines += _section("added", [(_where(p), _described(p.after)) for p in diff.added if p.after], most)
    lines += _section("removed", [(_where(p), _described(p.before)) for p in diff.removed if p.before], most)
    changed = [(_where(p), ", ".join(change.text for change in p.changes)) for p in diff.changed]
    lines += _section("changed", changed, most, _kinds(diff.changed, most))
    lines += _skeleton(diff.skeleton, most)
    return "\n".join(lines)


def _headline(diff: QdqDiff) -> str:
    counts = {"added": diff.added, "removed": diff.removed, "changed": diff.changed}
    pairs = ", ".join(f"{len(found)} {word}" for word, found in counts.items() if found)
    equal = f"{count_text(diff.equal, 'equal Q/DQ pair')}; " if diff.equal else ""
    none = "" if pairs or equal else "no Q/DQ in either; "
    behind = "the float models differ" if diff.skeleton.differs else "the float models are the same"
    return f"{f'Q/DQ pairs: {pairs}; ' if pairs else ''}{equal}{none}{behind}"


def _section(title: str, rows: list[tuple[str, str]], most: int | None, remark: str = "") -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"{title} ({len(rows)}){': ' if remark else ''}{remark}"
    shown = rows[:most]
    width = min(max(len(left) for left, _ in shown), 72) if any(right for _, right in shown) else 0
    yield from (f"  {left:<{width}}  {right}".rstrip() for left, right in shown)
    if len(rows) > len(shown):
        yield f"  and {len(rows) - len(shown)} more (--verbose shows all)"


def _where(pair: PairDiff) -> str:
    readers = [plain(reader, 40) for reader in pair.readers]
    return f"{plain(pair.tensor, 48)} > {list_text(readers, 2)}"


def _described(facts: PairFacts) -> str:
    if facts.problem:
        return facts.problem
    if facts.dynamic:
        return (
            f"{facts.format} in blocks of {facts.block}, scales found at run time, times {facts.scale[0]:.5g}"
        )
    scale = f"scale {facts.scale[0]:.5g}"
    if len(facts.scale) > 1:
        bounds = f"{min(facts.scale):.4g} to {max(facts.scale):.4g}"
        scale = f"{len(facts.scale)} scales on axis {facts.axis}, {bounds}"
    blocks = f" in blocks of {facts.block}" if facts.block else ""
    points = sorted(set(facts.zero_point))
    zero = f"{points[0]:g}" if len(points) == 1 else f"{points[0]:g} to {points[-1]:g}"
    kept = "" if not facts.weight else ", stored as integers" if facts.stored else ", a float weight"
    return f"{facts.format}{blocks}, {scale}, zero point {zero}{kept}"


def _kinds(pairs: Iterable[PairDiff], most: int | None) -> str:
    """Number of changed pairs by kind, with the bounds of scale changes, for long lists."""
    changes = [change for pair in pairs for change in pair.changes]
    counts = Counter(change.kind for change in changes)
    if most is None or sum(counts.values()) <= most:
        return ""
    lows = [change.low for change in changes if change.low is not None]
    highs = [change.high for change in changes if change.high is not None]
    bounds = f" ({percent_range(min(lows), max(highs))})" if lows else ""
    return ", ".join(
        f"{kind} of {count}{bounds if kind == 'scale' else ''}" for kind, count in counts.most_common()
    )


def _skeleton(skeleton: SkeletonDiff, most: int | None) -> Iterator[str]:
    if skeleton.folded:
        yield ""
        yield f"{len(skeleton.folded)} BatchNormalization are folded into convolutions in one of them, as tuning does"
    for title, name in _KINDS.items():
        found: tuple[str, ...] = getattr(skeleton, name)
        yield from _section(title, [(plain(words, 200), "") for words in found], most)
