"""One placement for several runtimes: two simulated devices with different fast kernels."""

from __future__ import annotations

import dataclasses
import math

import other_fake
import pytest

from qdqspec.session import Session
from qdqspec.types import Case, CommonPlacement, TuneRules
from tests.support.fake_times import true_ms

RULES = TuneRules(trials=4, min_sqnr_db="none")
OTHER = {"fake.seed": str(other_fake.SEED)}


@pytest.fixture(autouse=True)
def _other(monkeypatch):
    other_fake.install(monkeypatch)


def found_in(
    models, tmp_path, weights=None, rules: TuneRules = RULES, **settings
) -> tuple[CommonPlacement, Session]:
    settings = {"backend": "fake", "cache_dir": tmp_path / "cache", "output": tmp_path / "out"} | settings
    with Session(root=tmp_path, **settings) as session:
        for backend in ("fake", "other"):
            matrix = {"backend": backend}
            model = models / "digits_resnet.onnx"
            targets = weights or {"fake": 1.0, "other": 1.0}
            case = Case(id=backend, model=model, backend=backend, targets=targets, matrix=matrix, tune=rules)
            session.search(case)
        (found,) = session.find_common()
        assert session.record().common == (found,)
        assert session.find_common([case]) == ()  # no common placement for one runtime
        assert session.find_common()[0] is found
    return found, session


def true_ratio(models, tmp_path, words=None) -> float:
    """The ratio of the times of the written model and the float model without noise."""
    tuned = tmp_path / "out" / "digits_resnet" / "common" / "tuned.onnx"
    return true_ms(tuned, words) / true_ms(models / "digits_resnet.onnx", words)


def test_the_common_model_is_faster_than_float_on_all_devices(models, tmp_path):
    found, _ = found_in(models, tmp_path)
    assert not found.unchanged
    ratios = {target.target: target.ratio for target in found.targets}
    for target, words in (("fake", None), ("other", OTHER)):
        truth = true_ratio(models, tmp_path, words)
        assert truth < 1
        assert ratios[target].median == pytest.approx(truth, rel=0.05)
    truth = math.sqrt(true_ratio(models, tmp_path) * true_ratio(models, tmp_path, OTHER))
    assert found.mean.median == pytest.approx(truth, rel=0.05)


def test_the_loss_is_relative_to_the_winner_of_each_device(models, tmp_path):
    found, _ = found_in(models, tmp_path)
    for target in found.targets:
        assert target.loss.median == pytest.approx(target.ratio.median / target.own.median, rel=0.02)
        assert target.own_builds > 0


def test_the_seed_determines_the_common_placement(models, tmp_path):
    first, _ = found_in(models, tmp_path / "a", no_cache=True)
    second, _ = found_in(models, tmp_path / "b", no_cache=True)
    assert dataclasses.replace(first, seconds=0) == dataclasses.replace(second, seconds=0)


def test_the_mean_over_targets_is_weighted(models, tmp_path):
    found, _ = found_in(models, tmp_path, {"fake": 3.0, "other": 1.0})
    assert [target.weight for target in found.targets] == [0.75, 0.25]
    logs = sum(target.weight * math.log(target.ratio.median) for target in found.targets)
    assert found.mean.median == pytest.approx(math.exp(logs))


def test_no_common_model_is_written_if_the_gain_is_not_proved(models, tmp_path):
    found, _ = found_in(models, tmp_path, rules=dataclasses.replace(RULES, min_gain=0.9))
    assert found.unchanged
    assert "a gain of 90% is not proved" in found.reason or "no accurate candidate" in found.reason
    assert not (tmp_path / "out" / "digits_resnet" / "common").exists()


def test_no_candidate_below_the_limit_of_accuracy_is_selected(models, tmp_path):
    found, _ = found_in(models, tmp_path, rules=dataclasses.replace(RULES, min_sqnr_db=150.0))
    assert found.unchanged
    assert "no accurate candidate" in found.reason
