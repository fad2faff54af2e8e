"""Repeated rows are found in any context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qdqspec.graph.regions.inspect import Run, runs_of


def test_repeats_are_found_from_the_first_row():
    assert runs_of("aabababbbb") == [Run(0, 1, 1), Run(1, 2, 3), Run(7, 1, 3)]
    assert runs_of("") == []


@given(st.text("abc", max_size=40))
def test_runs_reproduce_the_rows(rows):
    runs = runs_of(rows)
    assert "".join(rows[run.start : run.start + run.width] * run.times for run in runs) == rows
    assert all(run.times != 2 for run in runs)
