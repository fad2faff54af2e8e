"""Records are converted to JSON data and back without loss, and values of other types are rejected."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qdqspec._core.codec import from_data, to_data


@dataclass(frozen=True, kw_only=True)
class Part:
    name: str
    ends: tuple[tuple[str, int], ...] = ()
    length: int = field(default=0, init=False)


@dataclass(frozen=True, kw_only=True)
class Whole:
    parts: frozenset[Part]
    by_name: dict[str, Part] = field(default_factory=dict)
    where: Path | None = None
    share: float = 0.0
    inner: Whole | None = None


WHOLE = Whole(
    parts=frozenset({Part(name="a", ends=(("x", 1),)), Part(name="b")}),
    by_name={"a": Part(name="a")},
    where=Path("some/folder"),
    share=float("inf"),
    inner=Whole(parts=frozenset()),
)


def test_a_record_is_read_back_from_json_text() -> None:
    data = json.loads(json.dumps(to_data(WHOLE)))
    assert "length" not in data["by_name"]["a"]
    assert from_data(Whole, data) == WHOLE


def test_a_set_is_written_in_a_fixed_order() -> None:
    parts = [Part(name=str(number)) for number in range(50)]
    assert to_data(frozenset(parts)) == to_data(frozenset(reversed(parts)))


def test_an_absent_field_has_its_default_and_an_unknown_one_is_ignored() -> None:
    assert from_data(Part, {"name": "a", "later": 1}) == Part(name="a")


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"name": 1}, "name: "),
        ({"ends": [["x", "1"]]}, "ends.0.1: "),
        ({"ends": [["x", True]]}, "ends.0.1: "),
        ({"ends": "x"}, "ends: "),
    ],
)
def test_a_value_of_another_type_is_an_error_with_its_field(changed: dict, where: str) -> None:
    with pytest.raises(ValueError, match=rf"^{where}"):
        from_data(Part, {"name": "a", **changed})
