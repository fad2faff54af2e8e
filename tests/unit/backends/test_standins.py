"""Every behaviour of the stand-ins names its source, on a page that is made from the list."""

from __future__ import annotations

from pathlib import Path

import pytest
import standins

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "stand-in.md"


@pytest.mark.parametrize("standin", standins.FILES)
def test_every_property_of_a_substitute_is_listed(standin: str) -> None:
    listed = [name for each in standins.BEHAVIOURS if each.standin == standin for name in each.names]
    assert len(set(listed)) == len(listed), "listed twice"
    public = {name for name in listed if not name.startswith("_")}
    assert public == standins.defined(standin) | standins.planted(standin)


def test_private_names_that_are_listed_exist() -> None:
    for each in standins.BEHAVIOURS:
        source = standins.FILES[each.standin].read_text(encoding="utf-8")
        assert each.source
        assert all(name in source for name in each.names if name.startswith("_"))


def test_the_page_is_the_generated_one(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        PAGE.write_text(standins.render(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == standins.render(), (
        "the list changed; renew the page with: pytest tests/unit/backends/test_standins.py --update-golden"
    )
