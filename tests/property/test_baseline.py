"""Any bytes are read as a baseline or raise one error; any baseline is read back from its file unchanged."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, strategies as st

from qdqspec.app.evidence.baselines import Baseline, Entry, RoleTimes, read_baseline, update_baseline
from qdqspec.errors import StateError
from qdqspec.types import Interval

MS = st.floats(1e-6, 1e6)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN = st.recursive(st.none() | st.booleans() | st.integers() | TEXT, st.lists, max_leaves=5)


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    rounds, builds = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    role = st.tuples(*[st.tuples(*[MS] * rounds)] * builds)
    times = st.builds(RoleTimes, wall_ms=role, cpu_ms=role)
    low, median, high = sorted(draw(st.tuples(MS, MS, MS)))
    return Entry(
        ratio=Interval(median=median, low=low, high=high),
        clock=draw(st.sampled_from(["cpu", "wall"])),
        samples={"tuned": draw(times), "reference": draw(times)},
        model_sha256=draw(TEXT),
        rules=draw(st.dictionaries(TEXT, PLAIN, max_size=3)),
        scheme=draw(TEXT),
        environment=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
    )


@given(st.dictionaries(st.tuples(TEXT, TEXT), entries(), min_size=1, max_size=3), TEXT)
def test_a_written_baseline_is_read_back(put: dict, device: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "device.json"
        update_baseline(path, device, put)
        known = read_baseline(path)
        assert known is not None
        assert known.device == device
        assert {name: known.entry(name) for name in known.names()} == put


def read(content: bytes) -> Baseline | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "device.json"
        path.write_bytes(content)
        return read_baseline(path)


@given(entries(), st.data())
def test_a_change_of_any_byte_is_an_error_or_is_whitespace(entry: Entry, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "device.json"
        update_baseline(path, "d", {("default", "regression"): entry})
        whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]))
    spoilt = whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :]
    try:
        known = read(spoilt)
    except StateError as error:
        assert "--qdq-update" in (error.cure or "")  # noqa: PT017 - the test checks the cure
    else:
        assert known == read(whole), "only whitespace between values may change"
