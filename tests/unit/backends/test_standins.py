"""Every behaviour of the stand-ins is listed with its source, on a page generated from the list."""

from __future__ import annotations

from pathlib import Path

import pytest
import standins

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "stand-in.md"


@pytest.mark.parametrize("standin", standins.FILES)
def test_every_behaviour_of_a_stand_in_is_listed(standin: str) -> None:
    listed = [name for each in standins.BEHAVIOURS if each.standin == standin for name in each.names]
    assert len(set(listed)) == len(listed), "listed twice"
    public = {name for name in listed if not name.startswith("_")}
    assert public == standins.defined(standin) | standins.planted(standin)


def test_listed_private_names_exist() -> None:
    for each in standins.BEHAVIOURS:
        source = standins.FILES[each.standin].read_text(encoding="utf-8")
        assert each.source
        assert all(name in source for name in each.names if name.startswith("_"))


def test_the_page_of_stand_ins_is_up_to_date(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        PAGE.write_text(standins.render(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == standins.render(), (
        "the list changed; renew the page with: pytest tests/unit/backends/test_standins.py --update-golden"
    )
