"""Properties in junit XML."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest


@pytest.mark.parametrize("arguments", [[], ["-n", "2"]])
def test_the_junit_properties_of_a_check(project, arguments):
    result = project.run_apart("--junitxml=out.xml", "-W", "error", *arguments)
    result.assert_outcomes(passed=4)
    cases = list(ET.parse(project.path / "out.xml").iter("testcase"))
    assert {case.get("classname") for case in cases} == {
        "specs.a.qdq.yaml.int8-b1",
        "specs.a.qdq.yaml.int8-b8",
    }
    for case in cases:
        found = {p.get("name"): p.get("value") for p in case.iter("property")}
        assert found["qdq.latency_ms"] == "2.0"
        assert found["qdq.reference_ms"] == "3.0"
        assert found["qdq.speedup"] == "1.5"
        assert found["qdq.sqnr_db"] == "31.5"
        assert found["qdq.backend"] == "fake-cpu"
        assert found["qdq.scheme"] == "e3b0c44298fc1c14"
        assert found["qdq.provenance"] == "measured"
        assert found["qdq.verdict"] == "pass"
