"""The report of the Q/DQ pairs that cost the most accuracy."""

from __future__ import annotations

import json
from dataclasses import replace

import yaml
from sample_evidence import sample_culprits

from qdqspec.app.report.culprits import culprits_json, culprits_text
from qdqspec.types import Consumer

SAMPLE = sample_culprits()


def test_the_text_of_responsible_pairs(golden) -> None:
    golden("explain/culprits.txt", culprits_text(SAMPLE) + "\n")


def test_the_text_where_noise_is_spread_over_many_pairs(golden) -> None:
    pairs = tuple(replace(pair, share=0.05, without_db=31.0) for pair in SAMPLE.pairs)
    spread = replace(SAMPLE, pairs=pairs, rest=0.85, missing="the time was over")
    golden("explain/culprits-spread.txt", culprits_text(spread) + "\n")


def test_the_lines_for_a_spec_are_valid_yaml_for_any_names_of_nodes() -> None:
    names = ['say "a"\\b', "x: [1]*", "Conv#5", "-"]
    pairs = tuple(
        replace(pair, site=replace(pair.site, consumers=(Consumer(name, 0),)), without_db=32.0 + number)
        for number, name in enumerate(names)
        for pair in SAMPLE.pairs[:1]
    )
    text = culprits_text(replace(SAMPLE, pairs=pairs))
    lines = text[text.index("patterns:") :]
    read = yaml.safe_load("\n".join(line.removeprefix("  ") for line in lines.split("\n")))
    assert read["patterns"]["nodes"]["exclude"] == ['say "a"\\b', "x: [[]1][*]", "Conv#5", "-"]


def test_the_json_of_responsible_pairs() -> None:
    found = culprits_json(SAMPLE)
    json.dumps(found, allow_nan=False)
    assert found["pairs"][2]["consumers"] == [{"node": "", "input": 0}]
    assert found["pairs"][0]["without_db"] == 35.2
    assert (found["total"], found["missing"]) == (12, None)
