"""Sections of a spec have the fields of their records, because fields are copied by name."""

from __future__ import annotations

from dataclasses import fields

import pytest

from qdqspec.spec.inputs import DataSection
from qdqspec.spec.sections import AccuracySection, QuantizeSection, RegionsSection, TuneSection
from qdqspec.types import AccuracyRules, ImageRules, QuantizeRules, RegionRules, TuneRules


@pytest.mark.parametrize(
    ("section", "record"),
    [
        (AccuracySection, AccuracyRules),
        (DataSection, ImageRules),
        (QuantizeSection, QuantizeRules),
        (RegionsSection, RegionRules),
        (TuneSection, TuneRules),
    ],
)
def test_every_field_of_the_record_is_a_key_of_the_section(section, record):
    assert {each.name for each in fields(record)} <= section.model_fields.keys()
