"""Baseline files: their content, how they are written, merged and removed, and how damaged ones are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from baseline_entries import entry_of

from qdqspec.checks.baselines import (
    Baseline,
    baseline_file,
    figures_elsewhere,
    history_of,
    read_baseline,
    update_baseline,
)
from qdqspec.errors import StateError
from qdqspec.types import Case, DeviceKey, Interval

BUILDS = ((2.0, 2.1), (2.2, 2.0))
ENTRY = entry_of(0.5, BUILDS, clock="cpu", model_sha256="ab" * 32)
NAME = ("default", "regression")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "__baselines__" / "net" / "device.json"
    update_baseline(path, "device", {NAME: ENTRY})
    return path


def test_a_changed_entry_changes_few_lines_of_the_file(file: Path) -> None:
    """Keys are sorted, each build has one line, and the file ends with a line break."""
    text = file.read_text()
    expected = json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
    for build in BUILDS:
        first, second = build
        expected = expected.replace(
            f"[\n        {first},\n        {second}\n       ]", f"[ {first}, {second} ]"
        )
    assert text == expected


def test_digests_of_models_are_kept_as_long_as_an_entry_is_of_the_model(file: Path) -> None:
    other = ENTRY.model_copy(update={"model_sha256": "cd" * 32})
    update_baseline(
        file,
        "device",
        {("b8", "regression"): other},
        models={"cd" * 32: "of the other", "ef" * 32: "of none"},
    )
    update_baseline(file, "device", {NAME: ENTRY}, models={"ab" * 32: "of the first"})
    known = read_baseline(file)
    assert known.models == {"ab" * 32: "of the first", "cd" * 32: "of the other"}
    update_baseline(file, "", {}, [NAME])
    known = read_baseline(file)
    assert (known.models, known.device) == ({"cd" * 32: "of the other"}, "device")


def test_dropping_the_last_entry_removes_the_file(file: Path) -> None:
    update_baseline(file, "", {}, [NAME, ("gone", "anyway")])
    assert not file.exists()
    assert read_baseline(file) is None


def test_an_update_replaces_a_damaged_file_and_that_of_another_device(file: Path) -> None:
    update_baseline(file, "another device", {("b8", "regression"): ENTRY})
    known = read_baseline(file)
    assert (known.device, known.names()) == ("another device", (("b8", "regression"),))
    file.write_bytes(file.read_bytes()[:100])
    update_baseline(file, "device", {NAME: ENTRY})
    assert read_baseline(file) == Baseline(device="device", cases={"default": {"regression": ENTRY}})


def changed(**values: object) -> str:
    data = json.loads(Baseline(device="d", cases={"default": {"regression": ENTRY}}).model_dump_json())
    data["cases"]["default"]["regression"].update(values)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "not a baseline"),
        ('{"schema_version": 2, "device": "d"}', "schema_version"),
        (changed(ratio={"median": 0, "low": 0, "high": 1}), "ratio: "),
        (changed(samples={}), "tuned and reference need samples"),
        (changed(samples={"tuned": {"wall_ms": [[1]]}, "reference": {"wall_ms": [[1]]}}), "gating clock"),
    ],
)
def test_a_damaged_file_is_one_error_that_names_it(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "device.json"
    path.write_text(content)
    with pytest.raises(StateError, match=words) as error:
        read_baseline(path)
    assert error.value.where == str(path)
    assert "--qdq-update" in (error.value.cure or "")


@pytest.mark.parametrize("case", ["default", "b8"])
def test_an_entry_that_was_changed_or_copied_to_another_name_is_refused(file: Path, case: str) -> None:
    """A change by hand or by a wrong merge."""
    data = json.loads(file.read_text())
    entry = data["cases"]["default"]["regression"]
    other = {"onnxruntime": "1.31.2"} if case == "default" else entry["environment"]
    data["cases"][case] = {"regression": {**entry, "environment": other}}
    file.write_text(json.dumps(data))
    with pytest.raises(StateError, match=f"{case}::regression was changed since it was written") as error:
        read_baseline(file)
    assert error.value.where == str(file)
    assert error.value.cure == "restore it from version control, or write it anew with --qdq-update=changed"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("../../etc/passwd", "etc-passwd.json"),
        ("NVIDIA H100 / 9.0", "NVIDIA-H100-9.0.json"),
        ("...", "device.json"),
        ("k" * 500, "k" * 120 + ".json"),
    ],
)
def test_any_device_key_gives_a_file_in_the_folder_of_baselines(key: str, name: str) -> None:
    case = Case(id="default", model=Path("/p/net.onnx"), spec=Path("/p/specs/net.qdq.yaml"))
    file = baseline_file(case, DeviceKey(key=key))
    assert file == Path("/p/specs/__baselines__/net") / name


def test_an_entry_keeps_the_last_figures_that_it_replaced() -> None:
    entry = ENTRY
    for number in range(30):
        new = ENTRY.model_copy(update={"ratio": Interval(median=1 + number, low=1, high=99)})
        entry = new.after(entry, (f"change {number}",))
    assert [figure.ratio.median for figure in entry.history] == [float(n) for n in range(10, 30)]
    assert entry.changed == ("change 29",)
    assert entry.history[-1].changed == ("change 28",)


def test_history_of_a_check_and_its_figures_on_other_devices(file: Path) -> None:
    new = ENTRY.model_copy(update={"ratio": Interval(median=0.4, low=0.39, high=0.41), "recorded": "later"})
    update_baseline(file, "device", {NAME: new.after(ENTRY, ("the model",))})
    update_baseline(file.with_name("far.json"), "far", {NAME: ENTRY})
    update_baseline(file.with_name("other.json"), "other", {("b8", "regression"): ENTRY})
    file.with_name("torn.json").write_text("{")
    known = read_baseline(file)
    entry = known.entry(NAME)
    assert entry is not None
    old, now = history_of(entry, known.device)
    assert (old.ratio.median, old.recorded, old.changed) == (0.5, ENTRY.recorded, ())
    assert (now.ratio.median, now.recorded, now.changed) == (0.4, "later", ("the model",))
    (far,) = figures_elsewhere(file, NAME)
    assert (far.device, far.ratio.median) == ("far", 0.5)
