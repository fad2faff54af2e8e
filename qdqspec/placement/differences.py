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
        "added": [_entry(pair) for pair in diff.added],
        "removed": [_entry(pair) for pair in diff.removed],
        "changed": [_entry(pair) for pair in diff.changed],
        "skeleton": {"same": not diff.skeleton.differs, **dataclasses.asdict(diff.skeleton)},
    }


def _entry(pair: PairDiff) -> dict[str, object]:
    return {
        "tensor": pair.tensor,
        "readers": list(pair.readers),
        "before": None if pair.before is None else dataclasses.asdict(pair.before),
        "after": None if pair.after is None else dataclasses.asdict(pair.after),
        "changes": [dataclasses.asdict(change) for change in pair.changes],
    }


def render_text(diff: QdqDiff, *, most: int | None = 12) -> str:
    """The differences as text: a summary first, then each difference, ``most`` of a kind."""
    lines = [_headline(diff)]
    lines += _section("added", [_standing(p, p.after) for p in diff.added], most)
    lines += _section("removed", [_standing(p, p.before) for p in diff.removed], most)
    lines += _section(
        "changed", [_changed(p) for p in diff.changed], most, " ".join(_kinds(diff.changed, most))
    )
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
    yield from _more(len(rows) - len(shown))


def _more(count: int) -> Iterator[str]:
    if count > 0:
        yield f"  and {count} more (--verbose shows all)"


def _where(pair: PairDiff) -> str:
    readers = [plain(reader, 40) for reader in pair.readers]
    return f"{plain(pair.tensor, 48)} > {list_text(readers, 2)}"


def _standing(pair: PairDiff, facts: PairFacts | None) -> tuple[str, str]:
    return _where(pair), _described(facts) if facts else ""


def _described(facts: PairFacts) -> str:
    if facts.problem:
        return facts.problem
    if facts.dynamic:
        return (
            f"{facts.format} in blocks of {facts.block}, scales found at run time, times {facts.scale[0]:.5g}"
        )
    many = len(facts.scale) > 1
    scale = (
        f"{len(facts.scale)} scales on axis {facts.axis}, {min(facts.scale):.4g} to {max(facts.scale):.4g}"
        if many
        else f"scale {facts.scale[0]:.5g}"
    )
    blocks = f" in blocks of {facts.block}" if facts.block else ""
    points = sorted(set(facts.zero_point))
    zero = f"{points[0]:g}" if len(points) == 1 else f"{points[0]:g} to {points[-1]:g}"
    kept = "" if not facts.weight else ", stored as integers" if facts.stored else ", a float weight"
    return f"{facts.format}{blocks}, {scale}, zero point {zero}{kept}"


def _changed(pair: PairDiff) -> tuple[str, str]:
    return _where(pair), ", ".join(change.text for change in pair.changes)


def _kinds(pairs: Iterable[PairDiff], most: int | None) -> Iterator[str]:
    """Number of changed pairs by kind, with the bounds of scale changes, for long lists."""
    changes = [change for pair in pairs for change in pair.changes]
    counts = Counter(change.kind for change in changes)
    if most is None or sum(counts.values()) <= most:
        return
    lows = [change.low for change in changes if change.low is not None]
    highs = [change.high for change in changes if change.high is not None]
    bounds = f" ({percent_range(min(lows), max(highs))})" if lows else ""
    yield ", ".join(
        f"{kind} of {count}{bounds if kind == 'scale' else ''}" for kind, count in counts.most_common()
    )


def _skeleton(skeleton: SkeletonDiff, most: int | None) -> Iterator[str]:
    if skeleton.folded:
        yield ""
        yield f"{len(skeleton.folded)} BatchNormalization are folded into convolutions in one of them, as tuning does"
    for title, name in _KINDS.items():
        found: tuple[str, ...] = getattr(skeleton, name)
        yield from _section(title, [(plain(words, 200), "") for words in found], most)
