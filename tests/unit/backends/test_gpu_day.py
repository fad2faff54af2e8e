"""The bundle of `doctor --bundle` (a first day on a GPU) is completed on the stand-ins, also with each of their
faults."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import standins
from packaging.version import Version
from trtexec_install import Trtexec

from qdqspec.backends.base import PLAIN, BuildOptions
from qdqspec.backends.tensorrt.exported import read_exported
from qdqspec.backends.tensorrt.gpu_day import models
from qdqspec.backends.tensorrt.gpu_day.archive import (
    RECORDED,
    answers_from,
    cleaned,
    hidden_words,
    run_part,
    start,
    write_bundle,
)
from qdqspec.backends.tensorrt.gpu_day.models import REFUSED
from qdqspec.backends.tensorrt.gpu_day.parts import BY_NAME, PARTS, Day, DayPart
from qdqspec.backends.tensorrt.lint import compiler
from qdqspec.codec import from_data, to_data
from qdqspec.errors import OutputError
from qdqspec.lint import lint_model, rules_for

SMI = """
==============NVSMI LOG==============
Timestamp                                 : Sun Nov 22 20:00:00 2026
Driver Version                            : 550.54.15
GPU 00000000:01:00.0
    Product Name                          : NVIDIA H100 PCIe
    Serial Number                         : 1652922000123
    GPU UUID                              : GPU-11111111-2222-3333-4444-555555555555
    Clocks Event Reasons
        Idle                              : Active
    Processes
        GPU instance ID                   : N/A
            Process ID                    : 4321
            Name                          : /home/alice.secret/bin/python
    Temperature
        GPU Current Temp                  : 31 C
"""
# Parts that run with each fault; the others do the same with other models.
FEW = ("machine", "three-layers", "cross-check", "refused-TRT001", "refused-TRT029")
LARGE_MIB = 1


def here(part: DayPart, day: Day, log: Path) -> str:
    """Run a part in this process: an interpreter for each part takes a second or more."""
    with log.open("w") as file, contextlib.redirect_stderr(file):
        run_part(part.name, from_data(Day, to_data(day)))
    return ""


def files_in(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {entry.name: archive.extractfile(entry) for entry in archive.getmembers()}
        return {name: file.read() for name, file in found.items() if file is not None}


def extracted(path: Path, folder: Path) -> Path:
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return folder / "gpu-day"


# The stand-in runs models with ONNX Runtime, and older versions make an invalid QLinearConv of a Conv in fp8.
OLD_STAND_IN = {"fp8"} if Version(onnxruntime.__version__) < Version("1.32") else set()


@pytest.fixture
def machine(
    install_trtexec: Callable[..., Trtexec],
    install_tensorrt: Callable[[str], None],
    put_nvidia_smi: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Callable[[str], None]:
    """A machine with TensorRT, trtexec and nvidia-smi, whose user is named alice.secret."""

    def install(version: str) -> None:
        tool = install_trtexec("11.1" if version.startswith("11") else "10.16")
        (tool.folder / "nvidia-smi").unlink()  # the first one has fewer fields
        install_tensorrt(version)
        script = put_nvidia_smi(
            **{"clocks.sm": "1980", "clocks.mem": "1593", "temperature.gpu": "31", "power.draw": "70",
               "clocks_event_reasons.active": "0x0", "driver_version": "550.54.15", "compute_mode": "Default",
               "mig.mode.current": "Disabled"}
        )  # fmt: skip
        (tmp_path / "smi.txt").write_text(SMI)
        text = script.read_text().partition("\n")
        script.write_text(f'{text[0]}\n[ "$1" = -q ] && {{ cat {tmp_path}/smi.txt; exit 0; }}\n{text[2]}')
        monkeypatch.setenv("HOME", str(tmp_path / "alice.secret"))
        monkeypatch.setenv("USER", "alice.secret")
        monkeypatch.setenv("FAKE_GPU_LOCK", str(tmp_path / "gpu.lock"))

    return install


def test_all_parts_are_done_with_the_newest_version(machine: Callable[[str], None], tmp_path: Path) -> None:
    version = "11.4.0.106"
    machine(version)
    said: list[str] = []
    options = BuildOptions(extra={"tensorrt.workspace": "64"})
    summary = write_bundle(tmp_path / "out.tgz", options, say=said.append, large_mib=LARGE_MIB, launch=here)
    by_name = {part["name"]: part for part in summary["parts"]}
    failed = {name: part["why"] for name, part in by_name.items() if part["status"] != "done"}
    # The stand-in has no operators of TensorRT's own domain, and no plugin library is given.
    assert failed.keys() - OLD_STAND_IN == {"plugins", "nvfp4", "mxfp8"}
    assert by_name["plugins"]["status"] == "unavailable"
    assert summary["whole"]
    assert len(said) == len(summary["parts"]) == len(PARTS)
    answers = summary["answers"]
    assert answers["runs"] is True
    assert answers["trtexec_agrees"] is True
    assert set(answers["resnet18_ms"]) == set(RECORDED)
    assert isinstance(answers["resnet18_order_as_recorded"], bool)
    assert "TRT001" not in answers["lint_disagrees"]
    assert by_name["three-layers"]["facts"]["sqnr_db"] > 100
    assert (
        by_name["shape-profiles"]["facts"]["median_ms_profile_1"]
        > by_name["shape-profiles"]["facts"]["median_ms"]
    )

    files = files_in(tmp_path / "out.tgz")
    assert json.loads(files["gpu-day/summary.json"])["answers"] == answers
    whole = b"\n".join(files.values())
    for word in (b"alice", str(tmp_path).encode(), b"1652922000123", b"11111111-2222", b"Process ID"):
        assert word not in whole, word
    smi = files["gpu-day/machine/nvidia-smi-q.txt"].decode()
    assert "GPU Current Temp                  : 31 C" in smi, "lines after the list of processes are kept"
    assert "Driver Version                            : 550.54.15" in smi
    assert b"numpy==" in files["gpu-day/machine/pip-freeze.txt"]
    assert b"--onnx" in files["gpu-day/trtexec-help/trtexec-help.txt"]
    assert json.loads(files["gpu-day/build-routes/build-routes.json"])["tuner_options"]


def test_all_parts_are_done_with_the_oldest_version(machine: Callable[[str], None], tmp_path: Path) -> None:
    machine("10.9.0.34")
    parts = [part for part in PARTS if not part.name.startswith("resnet18")]
    summary = write_bundle(tmp_path / "out.tgz", PLAIN, parts=parts, large_mib=LARGE_MIB, launch=here)
    failed = {part["name"]: part["why"] for part in summary["parts"] if part["status"] != "done"}
    assert failed.keys() - OLD_STAND_IN == {"plugins", "nvfp4", "mxfp8"}
    assert summary["answers"]["resnet18_order_as_recorded"] is None
    assert files_in(tmp_path / "out.tgz")["gpu-day/build-routes/build-routes.json"] == b"{}"


def test_files_of_the_bundle_are_read_like_recorded_samples(
    machine: Callable[[str], None], tmp_path: Path
) -> None:
    machine("10.16.1.11")
    parts = [BY_NAME[name] for name in ("three-layers", "int8", "trtexec", "shape-profiles")]
    write_bundle(tmp_path / "out.tgz", PLAIN, parts=parts, launch=here)
    folder = extracted(tmp_path / "out.tgz", tmp_path / "day")
    graphs = sorted(folder.rglob("*.graph.json"))
    assert len(graphs) == len(parts)
    for graph in graphs:
        found = read_exported([graph])
        assert found.has_times, graph.name
        assert found.layers
        assert found.end_to_end_ms is not None
        assert found.end_to_end_ms > 0
    (ours,) = (folder / "int8").glob("*.graph.json")
    assert re.fullmatch(r"trt10\.16\.1\.11-[a-z0-9-]+-int8\.graph\.json", ours.name)
    layers = read_exported([ours]).layers
    assert any(layer.integer for layer in layers)
    (builds,) = (folder / "int8").glob("*.builds.jsonl")
    assert {"seconds", "layers"} <= json.loads(builds.read_text().splitlines()[0]).keys()


FAULTS = sorted(
    name.removeprefix("fault ")
    for standin in ("tensorrt", "cuda")
    for name in standins.planted(standin)
    - {"fault exclusive-process"}  # tested below, since it needs two processes
)


rare = pytest.mark.skipif(
    "GPU_DAY_FAULTS" not in os.environ,
    reason="takes a minute; GPU_DAY_FAULTS=1 pytest tests/unit/backends/test_gpu_day.py runs it",
)


@rare
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_ends_in_an_archive(
    machine: Callable[[str], None], fail: Callable[[str], None], fault: str, tmp_path: Path
) -> None:
    """A part with the fault has a status and a reason, and the other parts are done."""
    machine("11.4.0.106")
    fail(fault)
    parts = [BY_NAME[name] for name in FEW]
    summary = write_bundle(tmp_path / "out.tgz", PLAIN, parts=parts, launch=here)
    statuses = {part["name"]: part["status"] for part in summary["parts"]}
    assert statuses.keys() == set(FEW)
    assert all(part["why"] for part in summary["parts"] if part["status"] != "done")
    assert "gpu-day/summary.json" in files_in(tmp_path / "out.tgz")
    assert summary["answers"]["runs"] == (statuses["three-layers"] == "done")
    if fault in ("null-engine", "out-of-memory", "failed-run", "null-context", "null-runtime"):
        assert statuses["three-layers"] == "failed"
        assert statuses["refused-TRT001"] == "done"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash-in-build", "was killed by SIGSEGV"),
        ("hang-in-build", "did not end within 4 s"),
        ("crash-in-run", "was killed by SIGSEGV"),
        ("hang-in-parse", "did not end within 4 s"),
    ],
)
def test_a_crash_or_hang_ends_one_part_only(
    machine: Callable[[str], None], fail: Callable[[str], None], fault: str, said: str, tmp_path: Path
) -> None:
    machine("11.4.0.106")
    fail(fault)
    parts = [replace(BY_NAME["three-layers"], seconds=4.0), BY_NAME["build-routes"]]
    summary = write_bundle(tmp_path / "out.tgz", PLAIN, parts=parts, launch=start)
    hit, other = summary["parts"]
    assert hit["status"] == "ended"
    assert said in hit["why"]
    assert other["status"] == "done", other
    if fault == "crash-in-build":
        assert b"Assertion failed" in files_in(tmp_path / "out.tgz")["gpu-day/three-layers/three-layers.log"]


def test_each_part_reports_a_gpu_that_another_process_holds(
    machine: Callable[[str], None], fail: Callable[[str], None], tmp_path: Path
) -> None:
    machine("11.4.0.106")
    fail("exclusive-process")
    with (tmp_path / "gpu.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        summary = write_bundle(tmp_path / "out.tgz", PLAIN, parts=[BY_NAME["three-layers"]])
    (part,) = summary["parts"]
    assert part["status"] == "failed"
    assert "cudaErrorDevicesUnavailable" in part["why"]


@rare
@pytest.mark.parametrize("fault", ["crash", "garbage", "no-summary", "silent"])
def test_a_failure_of_trtexec_fails_its_part_only(
    machine: Callable[[str], None], fault: str, install_trtexec: Any, tmp_path: Path
) -> None:
    machine("11.4.0.106")
    install_trtexec("11.1", fault={"time": fault})
    parts = [BY_NAME[name] for name in ("cross-check", "three-layers")]
    summary = write_bundle(tmp_path / "out.tgz", PLAIN, parts=parts, launch=here)
    assert [part["status"] for part in summary["parts"]] == ["failed", "done"], summary["parts"][0]


def test_an_exception_in_a_part_fails_that_part_only(
    machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(day: Day) -> dict[str, object]:
        raise ZeroDivisionError("a defect")

    machine("10.9.0.34")
    monkeypatch.setitem(BY_NAME, "broken", DayPart(name="broken", asks="?", run=broken))
    summary = write_bundle(
        tmp_path / "o.tgz", PLAIN, parts=[BY_NAME["broken"], BY_NAME["build-routes"]], launch=here
    )
    assert [part["status"] for part in summary["parts"]] == ["failed", "done"]
    assert summary["parts"][0]["why"] == "ZeroDivisionError: a defect"
    assert b"in broken" in files_in(tmp_path / "o.tgz")["gpu-day/broken/broken.log"]


def test_an_interrupted_bundle_has_the_finished_parts(machine: Callable[[str], None], tmp_path: Path) -> None:
    machine("10.9.0.34")

    def interrupted(part: DayPart, day: Day, log: Path) -> str:
        if part.name == "build-routes":
            raise KeyboardInterrupt
        return here(part, day, log)

    with pytest.raises(KeyboardInterrupt):
        write_bundle(
            tmp_path / "o.tgz", PLAIN, parts=[BY_NAME["machine"], BY_NAME["build-routes"]], launch=interrupted
        )
    summary = json.loads(files_in(tmp_path / "o.tgz")["gpu-day/summary.json"])
    assert not summary["whole"]
    assert [part["name"] for part in summary["parts"]] == ["machine"]


def test_an_archive_that_cannot_be_written_is_reported_before_any_part_runs(tmp_path: Path) -> None:
    def never(part: DayPart, day: Day, log: Path) -> str:
        raise AssertionError("nothing may run")

    with pytest.raises(OutputError, match="the archive"):
        write_bundle(tmp_path / "none" / "o.tgz", PLAIN, launch=never)


# ---- models, placements and texts ---------------------------------------------------------------


def test_each_lint_rule_of_what_the_parser_refuses_has_a_model() -> None:
    """The models are parsed, which does not show what the compiler refuses, or a GPU (TRT020)."""
    rules = {
        rule.id
        for target in ("tensorrt-10", "tensorrt-11")
        for rule in rules_for(target)
        if rule.severity == "refused" and rule.find.__module__ != compiler.__name__
    }
    assert rules == REFUSED.keys() | {"TRT020"}


@pytest.mark.parametrize("rule", REFUSED)
def test_each_model_breaks_its_rule_in_some_version(rule: str) -> None:
    model = REFUSED[rule].model()
    versions = ("10.9", "10.13", "10.16", "11.1")
    assert rule in {found.id for version in versions for found in lint_model(model, f"tensorrt-{version}")}


def test_pairs_of_the_placements_of_resnet18() -> None:
    found = {name: models.resnet18(name) for name in models.PLACEMENTS}
    pairs = {
        name: sum(node.op_type == "QuantizeLinear" for node in model.nodes) for name, model in found.items()
    }
    # Twenty convolutions read 17 tensors; a residual input is read by its block's first convolution as well.
    assert pairs["fp16"] == 0
    assert 0 < pairs["qat"] < pairs["residual"] < pairs["residual-qgap"] == pairs["residual"] + 1
    rejected = [
        each for each in lint_model(found["residual-qgap"], "tensorrt-11.1") if each.severity == "refused"
    ]
    assert rejected == []


def test_the_order_of_placements_is_compared_with_the_recorded_one() -> None:
    def facts(**medians: float) -> Mapping[str, dict[str, float]]:
        return {f"resnet18-{name.replace('_', '-')}": {"median_ms": value} for name, value in medians.items()}

    assert (
        answers_from(facts(fp16=0.9, qat=1.0, residual=0.6, residual_qgap=0.5))["resnet18_order_as_recorded"]
        is True
    )
    assert (
        answers_from(facts(fp16=0.9, qat=0.8, residual=0.6, residual_qgap=0.5))["resnet18_order_as_recorded"]
        is False
    )
    assert answers_from(facts(fp16=0.9))["resnet18_order_as_recorded"] is None


def test_names_paths_and_passwords_are_removed_from_texts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("USER", "bob.smith")
    monkeypatch.setenv("HOME", str(tmp_path / "bob.smith"))
    monkeypatch.chdir(tmp_path)
    hidden = hidden_words()
    text = f"{tmp_path}/bob.smith/model.onnx /home/carol/x bob.smith: GPU-00001111-2222-3333-4444-555566667777 bobsled"
    found = cleaned(text, hidden)
    assert "bob.smith" not in found
    assert "carol" not in found
    assert str(tmp_path) not in found
    assert "GPU-00000000-0000" in found
    assert "bobsled" in found
    assert cleaned("https://u:secret@h/x", hidden) == "https://u:***@h/x"


# ---- plugin libraries ---------------------------------------------------------------------------

_MARK = """
#include <stdio.h>
__attribute__((constructor)) static void on_load(void) {
    FILE* file = fopen(MARK, "w");
    if (file) fclose(file);
}
"""
_CREATORS = "void* getCreators(int* count) { *count = 0; return 0; }\n"
_UNDEFINED = "int missing(void);\nint needs(void) { return missing(); }\n"


def compiled(folder: Path, name: str, source: str) -> tuple[Path, Path]:
    """A shared library, and the file that it creates when it is loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library, mark = folder / f"{name}.so", folder / f"{name}.loaded"
    (folder / f"{name}.c").write_text(source)
    words = ["-shared", "-fPIC", f'-DMARK="{mark}"', "-o", str(library), str(folder / f"{name}.c")]
    subprocess.run([compiler, *words], check=True, capture_output=True)
    return library, mark


def plugin_part(folder: Path, *libraries: Path) -> dict[str, Any]:
    extra = {"tensorrt.plugins": os.pathsep.join(map(str, libraries))}
    parts = [BY_NAME["plugins"]]
    summary = write_bundle(folder / "out.tgz", BuildOptions(extra=extra), parts=parts, launch=here)
    (part,) = summary["parts"]
    return part


@pytest.mark.parametrize("version", ["10.9.0.34", "11.4.0.106"])
def test_plugin_libraries_of_both_kinds_are_loaded(
    machine: Callable[[str], None], tmp_path: Path, version: str
) -> None:
    """A library that registers itself (the common kind), and one for the registry of plugins."""
    machine(version)
    own, own_mark = compiled(tmp_path, "registers-itself", _MARK)
    registry, registry_mark = compiled(tmp_path, "for-the-registry", _MARK + _CREATORS)
    part = plugin_part(tmp_path, own, registry)
    assert part["status"] == "done", part["why"]
    assert own_mark.exists()
    assert registry_mark.exists()
    assert part["facts"]["libraries"] == {own.name: "system loader", registry.name: "plugin registry"}
    assert part["facts"]["median_ms"] > 0


def test_a_plugin_library_that_cannot_be_loaded_is_a_failed_part(
    machine: Callable[[str], None], tmp_path: Path
) -> None:
    machine("11.4.0.106")
    library, mark = compiled(tmp_path, "incomplete", _MARK + _UNDEFINED)
    part = plugin_part(tmp_path, library)
    assert part["status"] == "failed"
    assert "undefined symbol: missing" in part["why"]
    assert not mark.exists()
    files = files_in(tmp_path / "out.tgz")
    assert b"<given>/incomplete.so: undefined symbol: missing" in files["gpu-day/summary.json"]
    assert not any(tmp_path.name.encode() in content for content in files.values())
