"""``qdqspec reduce``: writes a small model with the same failure, and a program that reproduces it."""

from __future__ import annotations

import onnx


def test_a_failing_model_is_reduced(verb, models, tmp_path):
    words = ("--backend", "fake", "--backend-option", "fake.raise=build")
    found = verb("reduce", models / "digits_resnet.onnx", "-o", "fault", *words)
    assert found.code == 0, found.err
    assert "reduced to 1 in" in found.out
    assert len(onnx.load(tmp_path / "fault" / "reduced.onnx").graph.node) == 1
    assert "fake.raise" in (tmp_path / "fault" / "reproduce.py").read_text()
    found = verb("reduce", models / "digits_resnet.onnx", "-o", "fault", *words, "--json")
    assert found.json["nodes"] == 1
    assert found.json["complete"] is True


def test_a_model_without_failure_is_an_error(verb, models):
    found = verb("reduce", models / "digits_resnet.onnx", "-o", "fault", "--backend", "fake")
    assert found.code == 2
    assert "there is nothing to reduce" in found.err


def test_the_first_failed_candidate_of_a_search_is_reduced(verb, models, tmp_path):
    words = "--backend fake --backend-option fake.fail_rate=0.5 --trials 6 --min-sqnr-db none"
    found = verb("tune", models / "digits_resnet.onnx", "-o", "out", "--reduce-failures", *words.split())
    assert found.code == 0, found.err
    assert "the simulated device refuses this placement" in found.err
    (folder,) = (tmp_path / "out" / "faults").iterdir()
    assert folder.name.split("-")[0].isdecimal()
    assert (folder / "reproduce.py").is_file()
    assert len(onnx.load(folder / "reduced.onnx").graph.node) < 20
