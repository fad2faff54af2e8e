"""Compares the Q/DQ of two models, in names of the models without Q/DQ; the differences as text and as JSON.

Pairs are matched by their readers, never by their own names, which differ between tools. `qdqspec.qdq.skeleton`
compares the float models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from qdqspec._core.arrays import Array
from qdqspec._core.units import count_text, list_text, plain
from qdqspec.graph import Model
from qdqspec.qdq.chains import ScaledConstant
from qdqspec.qdq.equalize import equalizations_of, scaled
from qdqspec.qdq.formats import QuantParams, along
from qdqspec.qdq.pair_numbers import COMPUTED
from qdqspec.qdq.skeleton import (
    Skeleton,
    SkeletonDiff,
    align_names,
    compare_skeletons,
    compare_values,
    converted_like,
)
from qdqspec.qdq.strip import FoundPair, StrippedModel
from qdqspec.types import Consumer

SCHEMA_VERSION = 1

_KINDS = {
    "nodes only in the second": "added",
    "nodes only in the first": "removed",
    "nodes that differ": "changed",
    "constants that differ": "constants",
    "interface": "interface",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change in a pair: ``kind`` is chain, format, scale, zero point, axis, numbers, storage, integers, bias,
    channels, or weight: the pair is on other values, as one of the models is folded.

    A change of the chain is one of the pairs before it on the same values.

    ``low`` and ``high`` bound the relative change of a scale over its channels, such as -0.02 and 0.05.
    """

    kind: str
    text: str
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDiff:
    """Readers of a tensor whose pair differs between the models. ``before`` or ``after`` is ``None`` if float."""

    tensor: str
    readers: tuple[str, ...]
    before: FoundPair | None
    after: FoundPair | None
    changes: tuple[Change, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The form in JSON; scales are in channel order."""
        return {
            "tensor": self.tensor,
            "readers": self.readers,
            "before": None if self.before is None else _list_numbers(self.before),
            "after": None if self.after is None else _list_numbers(self.after),
            "changes": [asdict(change) for change in self.changes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class QdqDiff:
    """All differences of two models: pairs, and the float models without them."""

    added: tuple[PairDiff, ...]
    removed: tuple[PairDiff, ...]
    changed: tuple[PairDiff, ...]
    equal: int  # pairs that are the same in both
    left: int  # Q and DQ of the first that are no pairs, which count as nodes of the float model
    skeleton: SkeletonDiff

    @property
    def same(self) -> bool:
        """Whether the two compute the same."""
        return not (self.added or self.removed or self.changed or self.skeleton.differs)

    def to_json(self) -> dict[str, object]:
        """All differences, never truncated."""
        return {
            "schema_version": SCHEMA_VERSION,
            "same": self.same,
            "equal_pairs": self.equal,
            "counts": {name: len(getattr(self, name)) for name in ("added", "removed", "changed")},
            "changes": Counter(change.kind for pair in self.changed for change in pair.changes),
            "scale_change": _bound_scales([change for pair in self.changed for change in pair.changes]),
            **{
                name: [pair.to_json() for pair in getattr(self, name)]
                for name in ("added", "removed", "changed")
            },
            "skeleton": {"same": not self.skeleton.differs, **asdict(self.skeleton)},
        }

    def text(self, *, most: int | None = 12) -> str:
        """The differences as text: a summary first, then each difference, ``most`` of a kind."""
        lines = [_write_headline(self)]
        added = [(_write_place(pair), _describe_pair(pair.after)) for pair in self.added if pair.after]
        removed = [(_write_place(pair), _describe_pair(pair.before)) for pair in self.removed if pair.before]
        changed = [(_write_place(p), ", ".join(change.text for change in p.changes)) for p in self.changed]
        changes = [change for pair in self.changed for change in pair.changes]
        remark = ""
        if (
            most is not None and len(changes) > most
        ):  # the numbers of changes by kind, with the bounds of scales
            scales = _bound_scales(changes)
            bounds = {"scale": "" if scales is None else f" ({_write_percents(*scales)})"}
            counts = Counter(change.kind for change in changes).most_common()
            remark = ", ".join(f"{kind} of {count}{bounds.get(kind, '')}" for kind, count in counts)
        lines += _write_section("added", added, most)
        lines += _write_section("removed", removed, most)
        lines += _write_section("changed", changed, most, remark)
        skeleton = self.skeleton
        if skeleton.folded:
            nodes = count_text(len(skeleton.folded), "node")
            lines += ["", f"{nodes} folded into convolutions or weights in one of them, as tuning does"]
        if skeleton.converted:
            what = "as tuning does; the other one is converted alike"
            lines += ["", f"one of them was converted from float16 to float32, {what}"]
        for title, name in _KINDS.items():
            found: tuple[str, ...] = getattr(skeleton, name)
            lines += _write_section(title, [(plain(words, 200), "") for words in found], most)
        return "\n".join(lines)


def diff_models(a: Model, b: Model) -> QdqDiff:
    """Compare two models, either or both with Q/DQ, made by any tool.

    A float16 model is converted to float32 if the other one was.
    """
    given = a, b
    a, b = converted_like(a, b), converted_like(b, a)
    parts = StrippedModel(a, activations=b), StrippedModel(b, activations=a)
    names = align_names(parts[0].stripped, parts[1].stripped, named_first=True)
    sides = _Side(parts[0], {}), _Side(parts[1], names)
    skeleton = compare_skeletons(*sides)
    groups: dict[tuple[int, int], list[Consumer]] = {}
    for end in dict.fromkeys((*sides[0].at, *sides[1].at)):
        groups.setdefault((id(sides[0].at.get(end)), id(sides[1].at.get(end))), []).append(end)
    found = [_compare(sides, ends, bool(skeleton.folded)) for ends in groups.values()]
    differing = [pair for pair in found if pair is not None]
    return QdqDiff(
        added=tuple(pair for pair in differing if pair.before is None),
        removed=tuple(pair for pair in differing if pair.after is None),
        changed=tuple(pair for pair in differing if pair.before and pair.after),
        equal=len(found) - len(differing),
        left=sum(map(len, parts[0].found.left.values())),
        skeleton=replace(skeleton, converted=(a, b) != given),
    )


class _Side(Skeleton):
    """One model without its pairs, and these by their readers, which have ``names`` of the first model."""

    def __init__(self, part: StrippedModel, names: Mapping[str, str]) -> None:
        self.quantized, self.stripped = part.model, part.stripped
        self._equalized = equalizations_of(part.model.flat, part.stripped.constants)
        steps = {end: half for pair in part.pairs for half in self.half_step(pair) for end in pair.ends}
        super().__init__(part.stripped, names, steps)
        self.at = {self._name(end, pair.tensor): pair for pair in part.pairs for end in pair.ends}

    def _name(self, end: Consumer, tensor: str) -> Consumer:
        """A consumer as in the first model; outputs by name, as the models may have them in different orders."""
        if end.is_output:
            return Consumer(f"graph output '{tensor}'", 0)
        return Consumer(self.names.get(end.node, end.node), end.input)

    def read_by(self, wanted: Consumer) -> str:
        """The tensor that a consumer, as in the first model, reads without pairs; empty if there is none."""
        nodes = (node for node in self.stripped.nodes if self.names.get(node.name, node.name) == wanted.node)
        return next((node.input_at(wanted.input) for node in nodes), "")

    def factors(self, tensor: str) -> tuple[tuple[ScaledConstant, tuple[int, ...]], ...]:
        """The scaling of a constant's channels."""
        return tuple(
            (c, one.exponents) for one in self._equalized for c in one.constants if c.tensor == tensor
        )

    def half_step(self, pair: FoundPair) -> Iterator[Array]:
        """The largest rounding error of a weight that is stored in integers; nothing for other pairs."""
        if pair.stored and pair.numbers is not None and not pair.numbers.format.block:
            dims = tuple(self.quantized.constants[pair.quantized].dims)
            half: Array = along(pair.numbers.scale, dims, pair.numbers.axis or 0, 0) / 2
            for constant, exponents in self.factors(pair.tensor):
                half = scaled(np.broadcast_to(half, dims), constant, exponents, -1)
            yield half


def _compare(sides: tuple[_Side, _Side], ends: list[Consumer], is_folded: bool) -> PairDiff | None:
    """The difference of the pairs that these readers have in common in each model; ``None`` if there is none.

    If one of the models ``is_folded``, a pair may be on another weight than in the other one.
    """
    a, b = sides
    before, after = a.at.get(ends[0]), b.at.get(ends[0])
    changes = tuple(_find_changes(sides, before, after)) if before and after else ()
    if is_folded and before and after and before.weight and after.weight:
        halves = [*a.half_step(before), *b.half_step(after)]
        if words := compare_values(a.stripped, before.tensor, b.stripped, after.tensor, halves):
            changes += (Change(kind="weight", text=f"weight {words}"),)
    if before and after and not changes:
        return None
    tensor = before.tensor if before else after.tensor if after else ""
    if not (before and after):  # as it is float there: tools lose the names of weights
        tensor = (b if before else a).read_by(ends[0]) or tensor
    readers = (
        end.node if end.node.startswith("graph output '") else f"{end.node}:{end.input}"
        for end in sorted(ends)
    )
    return PairDiff(tensor=tensor, readers=tuple(readers), before=before, after=after, changes=changes)


def _list_numbers(pair: FoundPair) -> dict[str, object]:
    """A pair in JSON. ``dynamic`` is whether scales of blocks are computed at run time and multiplied by ``scale``."""
    numbers = pair.numbers
    return {
        "tensor": pair.tensor,
        "format": "" if numbers is None else numbers.format.stored_type,
        "scale": [] if numbers is None else numbers.step.reshape(-1).tolist(),
        "zero_point": [] if numbers is None else numbers.zero_point.astype(np.float32).reshape(-1).tolist(),
        "axis": None if numbers is None else numbers.axis,
        "block": 0 if numbers is None else numbers.format.block,
        "weight": pair.weight,
        "stored": pair.stored,
        "problem": COMPUTED if numbers is None else "",
        "dynamic": numbers is not None and numbers.is_dynamic,
    }


def _find_changes(sides: tuple[_Side, _Side], before: FoundPair, after: FoundPair) -> Iterator[Change]:
    chains = before.chain, after.chain
    counts = tuple(map(len, chains))
    if counts[0] != counts[1] or not all(one.same(other) for one, other in zip(*chains, strict=True)):
        first, second = (f"behind {count_text(count, 'other pair') if count else 'none'}" for count in counts)
        if counts[0] == counts[1]:
            second = f"behind {counts[1]} with other numbers"
        yield Change(kind="chain", text=f"{first} > {second}")
    if before.numbers is None or after.numbers is None:
        if before.computed != after.computed:
            states = ("its numbers are constants" if pair.numbers else COMPUTED for pair in (before, after))
            text = f"{COMPUTED}; these numbers are not the same in both"
            yield Change(kind="numbers", text=" > ".join(states) if before.numbers or after.numbers else text)
        return
    yield from _compare_numbers(before.numbers, after.numbers)
    if before.stored != after.stored and before.weight and after.weight:
        words = ("float behind Q and DQ", "stored as integers")
        yield Change(kind="storage", text=f"{words[before.stored]} > {words[after.stored]}")
    if before.bias != after.bias:
        words = ("as in the float model", "corrected")
        same = " in another way" if before.bias and after.bias else ""
        text = f"bias of its layer {words[bool(before.bias)]} > {words[bool(after.bias)]}{same}"
        yield Change(kind="bias", text=text)
    factors = tuple(side.factors(pair.tensor) for side, pair in zip(sides, (before, after), strict=True))
    if factors[0] != factors[1]:
        words = ("as in the float model", "scaled by powers of two")
        text = f"channels {words[bool(factors[0])]} > {'otherwise ' if all(factors) else ''}{words[bool(factors[1])]}"
        yield Change(kind="channels", text=text)
    if before.stored and after.stored and before.numbers.same(after.numbers):
        one, other = (
            side.quantized.array(pair.quantized) for side, pair in zip(sides, (before, after), strict=True)
        )
        if one.shape != other.shape:
            yield Change(kind="integers", text=f"shape {list(one.shape)} > {list(other.shape)}")
            return
        steps = np.abs(other.astype(np.float64) - one.astype(np.float64))
        if steps.any():
            count = int(np.count_nonzero(steps))
            text = f"{count} of {steps.size} integers, by up to {steps.max():g} steps"
            yield Change(kind="integers", text=text)


def _compare_numbers(before: QuantParams, after: QuantParams) -> Iterator[Change]:
    if before.format.elem_type != after.format.elem_type:
        yield Change(kind="format", text=f"{before.format.stored_type} > {after.format.stored_type}")
    if (before.axis, before.format.block) != (after.axis, after.format.block):
        axes = []
        for numbers in (before, after):
            channels = "per tensor" if numbers.axis is None else f"per channel on axis {numbers.axis}"
            blocks = f"blocks of {numbers.format.block} on axis {numbers.axis}"
            axes.append(blocks if numbers.format.block else channels)
        yield Change(kind="axis", text=" > ".join(axes))
    if before.precision != after.precision:
        yield Change(kind="precision", text=f"precision {before.precision} > {after.precision}")
    if before.is_dynamic != after.is_dynamic:
        words = ("scales of constants", "scales found at run time")
        yield Change(kind="scale", text=f"{words[before.is_dynamic]} > {words[after.is_dynamic]}")
    elif before.scale.shape != after.scale.shape:
        yield Change(kind="scale", text=f"{before.scale.size} > {after.scale.size} scales")
        return
    elif before.step.tobytes() != after.step.tobytes():
        yield _compare_scales(before.step, after.step)
    if not np.array_equal(before.zero_point, after.zero_point):
        points = _write_points(before.zero_point), _write_points(after.zero_point)
        yield Change(kind="zero point", text=f"zero point {points[0]} > {points[1]}")


def _compare_scales(before: npt.NDArray[np.float32], after: npt.NDArray[np.float32]) -> Change:
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.nan_to_num(after.astype(np.float64) / before - 1, posinf=np.inf).reshape(-1)
    low, high = float(relative.min()), float(relative.max())
    if before.size == 1:
        text = f"scale {before.item():.5g} > {after.item():.5g} ({_write_percent(low)})"
    else:
        count = int(np.count_nonzero(relative))
        text = f"{count} of {before.size} scales ({_write_percents(low, high)})"
    return Change(kind="scale", text=text, low=low, high=high)


def _write_percents(low: float, high: float) -> str:
    """``-5.0 % to +10.0 %``, or one percentage if both are equal."""
    texts = _write_percent(low), _write_percent(high)
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _write_percent(fraction: float) -> str:
    if 0 < abs(fraction) < 0.0005:
        return f"{100 * fraction:+.1e} %"
    return f"{100 * fraction:+.1f} %"


def _write_points(zero_point: npt.ArrayLike) -> str:
    points = np.unique(zero_point)
    return f"{points[0]:g}" if points.size == 1 else f"{points[0]:g} to {points[-1]:g}"


def _write_headline(diff: QdqDiff) -> str:
    counts = {word: len(getattr(diff, word)) for word in ("added", "removed", "changed")}
    pairs = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    equal = f"{count_text(diff.equal, 'equal Q/DQ pair')}; " if diff.equal else ""
    none = "" if pairs or equal else "no Q/DQ in either; "
    if none and diff.left:
        others = count_text(diff.left, "other Q or DQ", "other Q and DQ")
        none = f"no Q/DQ pairs that can be removed in either, and {others}; "
    behind = "the float models differ" if diff.skeleton.differs else "the float models are the same"
    return f"{f'Q/DQ pairs: {pairs}; ' if pairs else ''}{equal}{none}{behind}"


def _write_section(
    title: str, rows: list[tuple[str, str]], most: int | None, remark: str = ""
) -> Iterator[str]:
    if not rows:
        return
    yield ""
    yield f"{title} ({len(rows)}){': ' if remark else ''}{remark}"
    shown = rows[:most]
    width = min(max(len(left) for left, _ in shown), 72) if any(right for _, right in shown) else 0
    yield from (f"  {left:<{width}}  {right}".rstrip() for left, right in shown)
    if len(rows) > len(shown):
        yield f"  and {len(rows) - len(shown)} more (--verbose shows all)"


def _write_place(pair: PairDiff) -> str:
    readers = [plain(reader, 40) for reader in pair.readers]
    return f"{plain(pair.tensor, 48)} > {list_text(readers, 2)}"


def _describe_pair(pair: FoundPair) -> str:
    numbers = pair.numbers
    if numbers is None:
        return COMPUTED
    kind = numbers.format.stored_type
    kind += f" in blocks of {numbers.format.block}" if numbers.format.block else ""
    first = numbers.step.flat[0]
    if numbers.is_dynamic:
        return f"{kind}, scales found at run time{'' if first == 1 else f', times {first:.5g}'}"
    scale = f"scale {first:.5g}"
    if numbers.step.size > 1:
        bounds = f"{numbers.step.min():.4g} to {numbers.step.max():.4g}"
        scale = f"{numbers.step.size} scales on axis {numbers.axis}, {bounds}"
    kept = "" if not pair.weight else ", stored as integers" if pair.stored else ", a float weight"
    return f"{kind}, {scale}, zero point {_write_points(numbers.zero_point)}{kept}"


def _bound_scales(changes: Iterable[Change]) -> tuple[float, float] | None:
    """The bounds of the relative changes of scales; ``None`` without any."""
    found = [(c.low, c.high) for c in changes if c.low is not None and c.high is not None]
    return (min(low for low, _ in found), max(high for _, high in found)) if found else None
