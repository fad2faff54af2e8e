"""Combinations of a matrix, with ``exclude`` and ``include`` as in CI systems."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from qdqspec.spec.vocabulary import AXES, MAX_CASES, MAX_COMBINATIONS, slug

Value: TypeAlias = str | int
Choice: TypeAlias = dict[str, Value]


class MatrixError(ValueError):
    """A matrix gives no case, too many, or two with one name."""


def combinations(
    axes: Mapping[str, Sequence[Value]],
    exclude: Sequence[Mapping[str, Value]] = (),
    include: Sequence[Mapping[str, Value]] = (),
) -> tuple[Choice, ...]:
    """All choices of one value per axis, without the excluded, with the included added.

    The rules are those of GitHub Actions: an entry of ``exclude`` removes all combinations that have all its
    values; an entry of ``include`` extends all combinations of the axes whose own values it does not change,
    and becomes a separate combination if there are none.

    Raises `MatrixError` above `MAX_COMBINATIONS`, before ``exclude`` is applied.
    """
    if math.prod(len(values) for values in axes.values()) > MAX_COMBINATIONS:
        raise MatrixError(f"the matrix has more than {MAX_COMBINATIONS:,} combinations before exclude")
    originals = list(itertools.islice(_product(axes, exclude), MAX_CASES + 1))
    extended = [dict(choice) for choice in originals]
    added: list[Choice] = []
    for entry in include:
        fits = [n for n, choice in enumerate(originals) if _agrees(choice, entry)]
        for n in fits:
            extended[n].update(entry)
        if not fits:
            added.append(dict(entry))
    return tuple({axis: choice[axis] for axis in AXES if axis in choice} for choice in (*extended, *added))


def named_combinations(choices: Sequence[Choice]) -> dict[str, Choice]:
    """The choices by case id. Raises `MatrixError` if ids are not distinct."""
    if not choices:
        raise MatrixError("the matrix excludes every case")
    if len(choices) > MAX_CASES:
        raise MatrixError(f"the matrix gives more than {MAX_CASES} cases")
    named: dict[str, Choice] = {}
    for choice in choices:
        name = case_id(choice)
        if name in named:
            raise MatrixError(f"two cases of the matrix are called '{name}'")
        named[name] = choice
    return named


def case_id(choice: Mapping[str, Value]) -> str:
    """``int8-b8``: words unchanged, numbers with the first letter of their axis."""
    return "-".join(
        f"{axis[0]}{value}" if isinstance(value, int) else slug(value) for axis, value in choice.items()
    )


def _product(axes: Mapping[str, Sequence[Value]], exclude: Sequence[Mapping[str, Value]]) -> Iterator[Choice]:
    if not axes:
        return
    for values in itertools.product(*axes.values()):
        choice = dict(zip(axes, values, strict=True))
        if not any(entry.items() <= choice.items() for entry in exclude):
            yield choice


def _agrees(choice: Mapping[str, Value], entry: Mapping[str, Value]) -> bool:
    return all(choice.get(axis, value) == value for axis, value in entry.items())
