"""Baseline files: content, updates and damage; and which differences make an entry incomparable."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from baseline_entries import entry_of

from qdqspec.app.evidence.baselines import (
    Baseline,
    Conditions,
    baseline_file,
    read_baseline,
    rules_of,
    update_baseline,
)
from qdqspec.errors import StateError
from qdqspec.types import (
    Case,
    DeviceKey,
    Inputs,
    InputShape,
    Interval,
    PatternRules,
    QuantizeRules,
    ShapeProfile,
    TuneRules,
)

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


def test_an_update_replaces_the_file_of_another_device(file: Path) -> None:
    update_baseline(file, "another device", {("b8", "regression"): ENTRY})
    known = read_baseline(file)
    assert (known.device, known.names()) == ("another device", (("b8", "regression"),))


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


def test_specs_that_differ_in_their_suffix_share_no_baselines(tmp_path: Path) -> None:
    specs = [tmp_path / "net.qdq.yaml", tmp_path / "net.qdq.yml", tmp_path / "net.py"]
    for spec in specs:
        spec.touch()
    cases = [Case(id="default", model=Path("/p/net.onnx"), spec=spec) for spec in specs]
    folders = [str(baseline_file(case, DeviceKey(key="d"))).rpartition("/")[0] for case in cases]
    assert folders == [f"{tmp_path}/__baselines__/{name}" for name in ("net", "net.qdq.yml", "net.py")]


def test_an_entry_keeps_the_last_figures_that_it_replaced() -> None:
    entry = ENTRY
    for number in range(30):
        ratio = Interval(median=1 + number, low=1, high=99)
        entry = ENTRY.model_copy(update={"ratio": ratio, "scheme": f"{number}"}).after(entry)
    assert [figure.ratio.median for figure in entry.history] == [float(n) for n in range(10, 30)]
    assert entry.changed == ("placement: was 28, is 29",)
    assert entry.history[-1].changed == ("placement: was 27, is 28",)


CASE = Case(id="default", model=Path("/m.onnx"))
NOW = Conditions(
    clock="cpu",
    model_sha256="a" * 64,
    rules=rules_of(CASE),
    scheme="0123",
    environment={"onnxruntime": "1.31.1", "cpu": "Sample"},
)
KNOWN = entry_of(1, clock="cpu", rules=NOW.rules, environment=NOW.environment)


def changed_conditions(**fields: object) -> Conditions:
    return NOW.model_copy(update=fields)


def with_case(**fields: object) -> Conditions:
    return changed_conditions(rules=rules_of(replace(CASE, **fields)))


SHAPE = InputShape(min=(1, 3), opt=(8, 3), max=(8, 3))


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (changed_conditions(model_sha256="b" * 64), "model was aaaaaaaaaaaa, is bbbbbbbbbbbb"),
        (changed_conditions(clock="wall"), "clock was cpu, is wall"),
        (with_case(quantize=QuantizeRules(format="fp8")), "quantize.format was int8, is fp8"),
        (with_case(patterns=PatternRules(deny=("Softmax",))), "patterns.deny was empty, is Softmax"),
        (with_case(tune=TuneRules(min_sqnr_db=30.0)), "tune.min_sqnr_db was 20.0, is 30.0"),
        (with_case(inputs=Inputs(batch=8)), "inputs.batch was unset, is 8"),
        (with_case(inputs=Inputs(values={"sr": 8000})), "inputs.values was empty, is sr 8000"),
        (with_case(inputs=Inputs(profiles=(ShapeProfile(shapes={"x": SHAPE}),))), "inputs.shapes was"),
    ],
)
def test_other_conditions_are_refused_with_the_reason(now: Conditions, words: str) -> None:
    assert words in KNOWN.why_incomparable(now)


@pytest.mark.parametrize(
    "now",
    [
        with_case(tune=TuneRules(trials=3), title="another title"),
        changed_conditions(rules={**NOW.rules, "quantize.rounding": "even"}),  # missing in an older entry
    ],
)
def test_conditions_without_effect_on_the_ratio_are_no_difference(now: Conditions) -> None:
    assert KNOWN.why_incomparable(now) == ""
    assert KNOWN.differences(now) == ()


def test_a_changed_environment_is_reported_but_not_refused() -> None:
    environment = {"onnxruntime": "1.31.2", "cpu": "Sample", "python": "3.12"}
    now = changed_conditions(scheme="4567", environment=environment)
    assert KNOWN.why_incomparable(now) == ""
    assert KNOWN.differences(now) == (
        "placement: was 0123, is 4567",
        "onnxruntime: was 1.31.1, is 1.31.2",
        "python: was unknown, is 3.12",
    )


RENEWING = """
import sys
from pathlib import Path
from qdqspec.app.evidence.baselines import Entry, update_baseline
entry = Entry.model_validate_json(sys.argv[4])
sys.stdin.readline()  # all begin together
for number in range(int(sys.argv[3])):
    update_baseline(Path(sys.argv[1]), "a-cpu", {(f"{sys.argv[2]}-{number}", "regression"): entry})
"""
RUNS, ENTRIES = 4, 12


def test_a_baseline_file_contains_the_entries_of_all_concurrent_runs(tmp_path: Path) -> None:
    file = tmp_path / "__baselines__" / "net" / "a-cpu.json"
    entry = entry_of().model_dump_json()
    commands = [
        [sys.executable, "-c", RENEWING, str(file), f"run{n}", str(ENTRIES), entry] for n in range(RUNS)
    ]
    runs = [subprocess.Popen(command, stdin=subprocess.PIPE, text=True) for command in commands]
    for run in runs:
        run.stdin.write("\n")
        run.stdin.close()
    assert [run.wait(120) for run in runs] == [0] * RUNS
    known = read_baseline(file)
    assert known is not None
    assert len(known.names()) == RUNS * ENTRIES
    assert [path.name for path in file.parent.iterdir()] == ["a-cpu.json"], "no other file is left"
