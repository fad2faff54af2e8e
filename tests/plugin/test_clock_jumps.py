"""Jumps of the wall clock by hours during a run do not change results, cache or baseline."""

from __future__ import annotations

import json
import shutil

SPEC = """\
qdqspec: 1
model: digits_resnet.onnx
tune: {trials: 4, minutes: 5}
checks: [{kind: size, max_ratio: 2}, {kind: regression, max: 50%}]
"""
# Two consecutive calls return times that are hours apart, in either order.
JUMPING = """\
import itertools
import time

_real, _jumps = time.time, itertools.cycle((0, -5 * 3600, 7 * 3600, 90 * 86400, -400 * 86400))
time.time = lambda: _real() + next(_jumps)
"""
HOUR = 3600.0


def run(project, *words):
    words = (".", "--qdq-time-limit=10m", "--qdq-json=record.json", *words)
    project.runpytest_subprocess(*words).assert_outcomes(passed=2)
    return json.loads((project.path / "record.json").read_text())


def test_search_cache_and_baseline_are_unaffected_by_jumps_of_the_clock(simulated):
    project = simulated
    (project.path / "specs" / "net.qdq.yaml").write_text(SPEC)
    still = run(project, "--qdq-no-cache", "--qdq-update=new")
    shutil.rmtree(project.path / "reports")
    (project.path / "conftest.py").write_text(JUMPING)
    moved = run(project, "--qdq-update=all")
    for record in (still, moved):
        (case,) = record["cases"]
        assert 0 < record["seconds"] < HOUR
        assert 0 < case["search"]["seconds"] <= record["seconds"]
        assert all(0 <= trial["build_seconds"] < HOUR for trial in case["trials"]["list"])
        assert case["trials"]["total"] == 4, "no budget is exhausted"
    assert [trial["status"] for trial in moved["cases"][0]["trials"]["list"]] == [
        trial["status"] for trial in still["cases"][0]["trials"]["list"]
    ]
    again = run(project)
    provenance = again["cases"][0]["search"]["provenance"]
    assert provenance["source"] == "cached"
    assert 0 <= provenance["age_seconds"] < 500 * 24 * HOUR, "at most the jump of the clock"
    assert again["cases"][0]["regression"]["regression"]["state"] == "compared"
