"""The package's functions on the simulated device: what they return, and which arguments they refuse."""

from __future__ import annotations

import json
import pkgutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from chains import chain_model

import qdqspec
from qdqspec import QdqspecError, Spec, compare, measure, render, tune, verify
from qdqspec._core.units import at_least_text
from qdqspec.errors import BackendError, ConfigError, ModelError, StateError

pytestmark = pytest.mark.usefixtures("engine_threads")
SPEC = """qdqspec: 1
model: net.onnx
tune: {trials: 5}
checks:
  - {kind: speedup, min: 1.01}
  - {kind: parity, min_sqnr_db: 10}
  - {kind: size, max_bytes: 1MiB}
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(chain_model(), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


HERE: dict[str, Any] = {"backend": "fake"}


def test_a_model_is_tuned_and_its_files_are_saved(model: Path, tmp_path: Path) -> None:
    result = tune("net.onnx", trials=6, **HERE)
    assert result.record.cases[0].evidence is result.evidence
    assert result.speedup == result.latency.speedup
    assert not result.unchanged
    claim = f"{result.speedup.median:.2f}x, {at_least_text(result.latency.at_least)}"
    assert repr(result) == (
        f"Result({claim}, SQNR {result.parity.sqnr_db:.1f} dB, model={str(result.model)!r})"
    )
    assert result.scheme.pairs > 0
    assert result.model.is_file()
    saved = result.save(tmp_path / "saved")
    assert (saved / "tuned.onnx").read_bytes() == result.model.read_bytes()
    assert onnx.load(saved / "reference.onnx") == onnx.load(model)
    assert (saved / "scheme.json").is_file()
    for folder in (saved, tmp_path / "reports" / "net" / "default"):
        written = json.loads((folder / "result.json").read_text())
        assert written["speedup"]["median"] == result.speedup.median
    own = result.save(tmp_path / "reports" / "net" / "default")
    assert (own / "result.json").read_bytes() == (saved / "result.json").read_bytes()


def test_files_that_another_search_has_overwritten_are_not_taken_for_those_of_a_result(
    model: Path, tmp_path: Path
) -> None:
    first = tune(model, trials=3, no_cache=True, **HERE)
    again = tune(model, trials=3, no_cache=True, **HERE)
    assert first.model == again.model, "the same files"
    second = tune(
        model, trials=3, no_cache=True, calibration={"x": np.ones((4, 8, 12, 12), np.float32)}, **HERE
    )
    assert second.save(tmp_path / "second")
    for use in (lambda: first.model, lambda: first.save(tmp_path / "first")):
        with pytest.raises(StateError, match="overwritten by another search"):
            use()
    assert str(second.model) in repr(first)


def test_an_unchanged_result_has_the_float_model_as_tuned_model(model: Path, tmp_path: Path) -> None:
    result = tune(model, exclude=["*"], **HERE)
    assert result.unchanged
    assert repr(result) == f"Result(unchanged: {result.reason}, SQNR exact, model={str(model)!r})"
    assert result.model == model
    assert result.scheme.sites == frozenset()
    assert onnx.load(result.save(tmp_path / "saved") / "tuned.onnx") == onnx.load(model)


def test_a_tuned_model_is_measured_again_and_verified(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no winner is known"):
        measure(model, trials=6, **HERE)
    result = tune(model, trials=6, **HERE)
    for latency in (measure(model, trials=6, **HERE), measure(model, result.model, **HERE)):
        assert latency.builds == 3
        assert latency.speedup.median == pytest.approx(result.speedup.median, rel=0.15)
        assert set(latency.samples) >= {"reference", "tuned"}
    assert measure(model, model, **HERE).speedup.median == pytest.approx(1, abs=0.05)
    assert verify(model, result.model, **HERE).sqnr_db == pytest.approx(result.parity.sqnr_db)
    assert verify(model, model, **HERE).max_abs == 0
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    with pytest.raises(BackendError, match=r"broken\.onnx: the model does not run"):
        measure(model, "broken.onnx", **HERE)


@pytest.mark.parametrize("spec", ["net.qdq.yaml", "net.qdq.yml"])
def test_untimed_checks_of_a_spec_are_judged(model: Path, tmp_path: Path, spec: str) -> None:
    (tmp_path / spec).write_text(SPEC)
    tune(f"{spec}::default", **HERE)
    record = verify(f"{spec}::default", **HERE)
    assert {result.id: result.verdict.outcome for result in record.cases[0].results} == {
        "parity": "pass",
        "size": "pass",
    }


def test_a_case_of_a_spec_takes_its_options_from_the_spec(model: Path, tmp_path: Path) -> None:
    (tmp_path / "net.qdq.yaml").write_text(SPEC + "matrix: {weights: [per-channel, per-tensor]}\n")
    with pytest.raises(ConfigError, match="this spec has 2 cases"):
        tune("net.qdq.yaml", **HERE)
    with pytest.raises(ConfigError, match="has its options in the spec"):
        tune("net.qdq.yaml::per-tensor", trials=3, **HERE)
    nothing = {"nodes": {"exclude": ["*"]}}
    (case,) = Spec(
        model="net.onnx", tune={"trials": 1}, patterns=nothing, checks=[{"kind": "speedup", "min": 1.1}]
    ).cases()
    assert tune(case, **HERE).unchanged


def test_records_are_rendered_and_compared(model: Path, tmp_path: Path) -> None:
    result = tune(model, trials=1, **HERE)
    assert render(result.record, "run.json") == tmp_path / "run.json"
    assert "net" in render(result.record, "run.md").read_text()
    assert [case.word for case in compare("run.json", result.record).cases] == ["same"]


@pytest.mark.parametrize(
    ("name", "words", "error", "message"),
    [
        ("net.onnx", {"trails": 3}, ConfigError, r"unknown word 'trails' \(did you mean 'trials'"),
        ("net.onnx", {"strategy": "regoin"}, QdqspecError, "did you mean 'region'"),
        ("net.onnx", {"weights": "per-chanel"}, QdqspecError, "did you mean 'per-channel'"),
        ("net.onnx", {"name": "../elsewhere"}, QdqspecError, "name"),
        ("net.onnx", {"quant": "int7"}, QdqspecError, "int7"),
        ("net.onnx", {"calibration": "nowhere.npz"}, QdqspecError, "nowhere.npz"),
        ("net.onnx", {"backend": "fak"}, QdqspecError, "did you mean 'fake'"),
        ("nowhere.onnx", {}, ModelError, "nowhere.onnx"),
    ],
)
@pytest.mark.usefixtures("model")
def test_wrong_arguments_raise_one_error(
    name: str, words: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tune(name, **{**HERE, **words})


@pytest.mark.parametrize(
    "words",
    [
        {"mode": "mesure"},  # ran a search
        {"threads": 0},
        {"seed": "x"},
        {"seed": -3},
        {"time_limit": "soon"},
        {"treads": 2},
    ],
)
def test_a_setting_that_does_not_fit_is_refused_before_anything_runs(words: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(words))):
        qdqspec.Session(**words)


def test_settings_in_python_have_the_types_of_options(tmp_path: Path) -> None:
    settings = qdqspec.Session(time_limit="2m", threads="2", cache_dir=tmp_path, output="out").settings
    assert (settings.time_limit, settings.threads, settings.cache_dir) == (120, 2, tmp_path)
    assert settings.output == Path.cwd() / "out"
    assert qdqspec.Session(time_limit=1.5).settings.time_limit == 1.5


def test_regions_of_a_model_in_memory(model: Path) -> None:
    assert qdqspec.find_regions(onnx.load(model)) == qdqspec.find_regions(model)


def test_each_public_name_is_an_attribute_of_the_package_and_no_module() -> None:
    """Importing such a module would replace the public name by the module."""
    for name in qdqspec.__all__:
        assert getattr(qdqspec, name) is not None
    assert qdqspec.measure is measure
    with pytest.raises(AttributeError, match="nothing"):
        _ = qdqspec.nothing
    modules = {module.name for module in pkgutil.iter_modules(qdqspec.__path__)}
    assert modules.isdisjoint(qdqspec.__all__)
    assert "timing" in modules
