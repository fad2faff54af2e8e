"""Backend trtexec with a stand-in that accepts the real options and replays recorded logs; whole searches with it."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import kernels, saved
from processes import runs, wait_until

from qdqspec._core.config import Settings
from qdqspec.app.session import Session
from qdqspec.backends.base import Backend, BuildOptions
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.backends.tensorrt.cache import Shared
from qdqspec.backends.trtexec.engine import Trtexec
from qdqspec.backends.trtexec.process import FATAL, NOTES, read_log
from qdqspec.errors import BackendError, BackendUnavailableError
from qdqspec.testing.backends import BackendContract
from qdqspec.types import Case, InputShape, RegionRules, ShapeProfile, TuneRules

FEEDS = {"x": np.random.default_rng(0).uniform(-1, 1, (1, 3, 8, 8)).astype(np.float32)}
COMMON = {"--stronglyTyped", "--useCudaGraph", "--useSpinWait", "--noDataTransfers", "--separateProfileRun"}


def names(words):
    return {word.partition("=")[0] for word in words}


def value(words, option):
    return next(word.partition("=")[2] for word in words if word.startswith(f"{option}="))


class TestTrtexec(BackendContract):
    @pytest.fixture(params=["10.16", "11.1"])
    def backend(self, request, install_trtexec) -> Backend:
        install_trtexec(request.param)
        return Trtexec()


@pytest.fixture
def engine(model):
    """``engine(extra...)`` builds the small model and binds its input."""
    built = []

    def build(**extra):
        words = {f"trtexec.{name.replace('_', '-')}": text for name, text in extra.items()}
        built.append(Trtexec().build(model, BuildOptions(extra=words)))
        built[-1].bind(FEEDS)
        return built[-1]

    yield build
    for one in built:
        one.close()


@pytest.mark.parametrize("version", ["10.16", "11.1"])
def test_flags_are_the_same_for_both_major_versions(install_trtexec, engine, version):
    tool = install_trtexec(version)
    made = engine()
    made.time(5)
    made.layers()
    built, timed, profiled = tool.calls()
    assert names(built) >= {"--saveEngine", "--skipInference", "--stronglyTyped", "--exportLayerInfo"}
    assert value(built, "--profilingVerbosity") == "detailed"
    assert names(timed) >= (COMMON - {"--stronglyTyped"}) | {"--exportTimes", "--loadInputs"}
    assert value(timed, "--warmUp") == "500"  # milliseconds, not runs
    assert names(profiled) >= {"--dumpProfile", "--exportProfile", "--separateProfileRun"}
    assert "--dumpProfile" not in timed, "a profiler would slow what is timed"


def test_times_are_gpu_compute(install_trtexec, engine):
    """The latency is nine times the compute time."""
    install_trtexec()
    made = engine()
    samples = made.time(20)
    assert (len(samples.wall_ms), samples.cpu_ms) == (20, ())
    layers = sum(layer.milliseconds for layer in made.layers())
    assert samples.median_ms("wall") == pytest.approx(layers, rel=0.05)


def test_arguments_and_plugins_of_the_user_are_in_every_call(install_trtexec, engine, tmp_path):
    tool = install_trtexec("10.16")
    one, two = tmp_path / "one.so", tmp_path / "two.so"
    one.touch()
    two.write_bytes(b"\0getCreators\0")
    args = "--fp16 --device=1 --profilingVerbosity=layer_names_only"
    engine(args=args, plugins=f"{one}{os.pathsep}{two}").time(2)
    for words in tool.calls():
        assert {"--fp16", "--device=1", f"--staticPlugins={one}", f"--dynamicPlugins={two}"} <= set(words)
        assert "--stronglyTyped" not in words, "weak typing excludes it"
    verbosity = [word for word in tool.calls()[0] if word.startswith("--profilingVerbosity")]
    assert verbosity == ["--profilingVerbosity=layer_names_only"], "it replaces that of the backend"


def test_the_chosen_gpu_is_queried_and_passed_to_trtexec(install_trtexec, model, monkeypatch):
    tool = install_trtexec()
    backend, second = Trtexec(), BuildOptions(device=1)
    assert backend.device(BuildOptions()).key == "nvidia-a100-80gb-pcie-sm80-trtexec-10.16"
    assert backend.device(second).key == "nvidia-l4-sm89-trtexec-10.16"
    assert backend.probe(second).facts["GPU"] == "NVIDIA L4"
    assert backend.capabilities().formats == ("int8",)
    assert backend.capabilities(second).formats == ("int8", "fp8")
    backend.build(model, second).close()
    backend.build(model, BuildOptions()).close()
    first, other = tool.calls()
    assert "--device=1" in first
    assert "--device" not in names(other), "the default GPU needs no option"
    own = BuildOptions(device=2, extra={"trtexec.args": "--device=1"})
    assert backend.device(own).key.startswith("nvidia-l4-")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
    assert backend.device(second).key.startswith("nvidia-a100-"), "the second of the visible ones is number 0"
    assert "GPU" not in backend.probe(BuildOptions(device=2)).facts


def test_builds_of_a_run_share_a_timing_cache_unless_they_are_fresh(install_trtexec, model, tmp_path):
    tool, own, state = install_trtexec(), {"trtexec.timing-cache": "own.cache"}, tmp_path / "state"
    Shared(state, "trtexec").write(b"timings")
    with closing(Trtexec().build(model, BuildOptions(state=state))):
        assert Path(value(tool.calls()[0], "--timingCacheFile")).read_bytes() == b"timings"
    for extra in ({}, own):
        Trtexec().build(model, BuildOptions(state=state, fresh=True, extra=extra)).close()
    _, fresh, fresh_with_own = tool.calls()
    assert "--timingCacheFile" not in names(fresh) | names(fresh_with_own)


# ---- dynamic shapes -----------------------------------------------------------------------------


@pytest.fixture
def dynamic(model):
    proto = onnx.load(model)
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(proto, model)
    return model


def test_options_of_several_shape_profiles_follow_their_numbers(install_trtexec, dynamic):
    tool = install_trtexec()
    both = (FEEDS, {"x": np.repeat(FEEDS["x"], 4, axis=0)})
    shapes = InputShape.of(FEEDS["x"].shape), InputShape(min=(2, 3, 8, 8), opt=(4, 3, 8, 8), max=(9, 3, 8, 8))
    profiles = tuple(ShapeProfile(shapes={"x": shape}) for shape in shapes)
    made = Trtexec().build(dynamic, BuildOptions(profiles=profiles))
    for profile, feeds in enumerate(both):
        made.bind(feeds, profile)
    medians = [made.time(9, profile=profile).median_ms("wall") for profile in (0, 1, 0)]
    # The second shape profile of the stand-in takes twice as long.
    assert medians[1] == pytest.approx(2 * medians[0], rel=0.1)
    assert medians[2] == pytest.approx(medians[0], rel=0.1)
    assert sum(layer.milliseconds for layer in made.layers(profile=1)) == pytest.approx(medians[1], rel=0.1)
    made.close()
    built, first, second, *_ = tool.calls()
    first_words, second_words = (
        [
            f"--{which}Shapes=x:{batch}x3x8x8"
            for which, batch in zip(("min", "opt", "max"), batches, strict=True)
        ]
        for batches in ((1, 1, 1), (2, 4, 9))
    )
    start = built.index("--profile=0")
    assert built[start : start + 8] == ["--profile=0", *first_words, "--profile=1", *second_words]
    assert "--useProfile" not in names(first)
    assert value(second, "--useProfile") == "1"
    assert value(second, "--shapes") == "x:4x3x8x8"


def test_a_dynamic_input_without_shape_is_an_error(install_trtexec, dynamic):
    tool = install_trtexec()
    with pytest.raises(BackendError, match="input x has dynamic dimensions and no shape is given"):
        Trtexec().build(dynamic, BuildOptions())
    assert not (tool.folder / "calls.jsonl").exists() or tool.calls() == []


# ---- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "fault", "message"),
    [
        ("build", "parse_failure", "Parsing model failed"),
        ("build", "out_of_memory_fatal", "out of memory"),
        ("build", "crash", "was killed by SIGABRT"),
        ("build", "silent", "ended without a verdict"),
        ("build", "garbage", "wrote no engine"),
        ("time", "engine_mismatch", "deserialization failed"),
        ("time", "crash", "SIGABRT"),
        ("time", "nothing", "wrote no times.json"),
    ],
)
def test_a_failed_build_or_run_has_a_reason_of_one_line(
    install_trtexec, engine, model, stage, fault, message
):
    install_trtexec(fault={stage: fault})
    with pytest.raises(BackendError, match=message) as caught:
        engine().time(3)
    assert "\n" not in caught.value.what
    assert stage == "time" or caught.value.where == str(model)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("timeout", "options", "said"),
    [
        (3.0, BuildOptions(), "gave no answer"),
        # slightly less than the limit, so that the reason is reported
        (60.0, BuildOptions(build_seconds=4.0), r"was ended after 3\.8 s"),
    ],
)
def test_trtexec_ends_with_a_candidate_that_is_given_up(install_trtexec, model, timeout, options, said):
    tool = install_trtexec(fault={"build": "hang"})
    with Isolated("trtexec", build_timeout=timeout) as backend, pytest.raises(BackendError, match=said):
        backend.build(model, options)
    pid = (tool.folder / "pid").read_text()
    wait_until(lambda: not runs(pid))


def test_an_unknown_option_of_the_user_is_named(install_trtexec, model):
    tool = install_trtexec("11.1")
    with pytest.raises(BackendError, match="Unknown option: --fp16") as caught:
        Trtexec().build(model, BuildOptions(extra={"trtexec.args": "--fp16"}))
    assert "trtexec.args" in caught.value.cure
    assert len(tool.calls()) == 1


def test_a_missing_trtexec_and_another_program_or_version_of_that_name_are_reported(
    install_trtexec, monkeypatch, tmp_path, model
):
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.setattr("qdqspec.backends.trtexec.process._USUAL_PLACES", ())
    availability = Trtexec().probe()
    assert (availability.usable, availability.why) == (False, "there is no trtexec on PATH")
    assert "TensorRT" in availability.install
    with pytest.raises(BackendUnavailableError):
        Trtexec().build(model, BuildOptions())
    other = tmp_path / "bin" / "trtexec"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho usage: something else\n")
    other.chmod(0o755)
    assert "--help does not work: usage: something else" in Trtexec().probe().why
    install_trtexec("8.6")
    availability = Trtexec().probe()
    assert not availability.usable
    assert "8.6.1 is too old" in availability.why, "it has no strong typing"


def test_passwords_are_removed_from_errors_and_output(install_trtexec, model, capfd):
    install_trtexec("10.16", fault={"build": "parse_failure"})
    args = "--remoteAutoTuningConfig=ssh://ann:s3cr:e@t@orin:22?remote_exec_path=/opt --safe"
    with pytest.raises(BackendError) as caught:
        Trtexec().build(model, BuildOptions(extra={"trtexec.args": args}))
    seen = str(caught.value) + "".join(capfd.readouterr())
    assert "ssh://ann:***@orin" in seen
    assert "s3cr" not in seen
    assert "e@t" not in seen


def test_outputs_may_be_nan_or_infinite_and_wrong_files_are_errors(install_trtexec, model):
    from qdqspec.backends.trtexec.process import read_outputs
    from qdqspec.graph.model import load_model

    loaded = load_model(model)
    name = loaded.outputs[0]
    text = f'[{{"name": "{name}", "dimensions": "2x2", "values": [nan, -inf, 1.5, inf]}}]'
    found = read_outputs(text, loaded)[name]
    assert found.shape == (2, 2)
    assert np.isnan(found[0, 0])
    assert found[0, 1] == -np.inf
    for broken in ("", "[]", text.replace("2x2", "3"), '{"a": 1}', "[1]"):
        with pytest.raises(BackendError, match="cannot be read"):
            read_outputs(broken, loaded)


# ---- recorded logs and messages ----------------------------------------------------------------------


SAMPLES = Path(__file__).parents[2] / "data" / "tensorrt" / "samples"
MESSAGES = [json.loads(line) for line in (SAMPLES / "trtexec-messages.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("message", MESSAGES, ids=[f"{m['class']}-{m['tensorrt']}" for m in MESSAGES])
def test_every_recorded_message_has_its_class(message):
    report = read_log("\n".join(message["lines"]))
    if message["class"] in NOTES:
        assert report.cause is None, "a build with this message may pass"
        assert {kind for kind, _ in report.messages} == {message["class"]}
    else:
        assert report.cause.kind == message["class"]
        assert re.fullmatch(r"[^\[\n].*", report.cause.text)


@pytest.mark.parametrize(
    ("name", "verdict", "version"),
    [
        ("trt10.16-mnist-onnx-build-and-run.log", "PASSED", (10, 16, 1)),
        ("trt10.16-mnist-dumpProfile.log", "PASSED", (10, 16, 1)),
        ("trt11.0-mnist-dumpProfile.excerpt.log", "PASSED", (11, 0, 0)),
        ("trt11.0-removed-flags.excerpt.log", "", None),
        ("trt10.16-python-api-errors.log", "", None),
    ],
)
def test_every_recorded_log_is_read(name, verdict, version):
    report = read_log((SAMPLES / name).read_text(encoding="utf-8"))
    assert (report.verdict, report.version) == (verdict, version)


@pytest.mark.parametrize(
    "line",
    [
        "[W] Dynamic dimensions required for input: x, but no shapes were provided. Automatically overriding",
        "[W] Shape missing for input with dynamic shape: xAutomatically setting shape to: 1x1x28x28",
    ],
)
def test_shapes_assumed_by_trtexec_are_an_error_even_if_it_passes(line):
    cause = read_log(f"{line}\n&&&& PASSED TensorRT.trtexec # trtexec").cause
    assert cause.kind == "shapes_assumed"
    assert "inputs.shapes" in FATAL[cause.kind][1]


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("* Throughput may be bound by Enqueue Time rather", "Throughput may be bound by Enqueue"),
        ("* Throughput may be bound by host-to-device transfers for", "Throughput may be bound by host"),
        ("The specified --useCudaGraph flag has been ignored.", "not recorded as a CUDA graph: The"),
        ("Weakly-typed networks have been deprecated in TensorRT 10.12.", "Weakly-typed networks have been"),
    ],
)
def test_warnings_in_the_source_of_trtexec_are_notes(line, note):
    (found,) = read_log(f"[07/07/2026-02:10:54] [W] {line}").notes
    assert found.startswith(note)


# ---- whole searches ------------------------------------------------------------------------------


SEARCHED = pytest.mark.usefixtures("trtexec_here", "hasty")


@pytest.fixture
def case(tmp_path) -> Case:
    """Two convolutions and operators that fuse with them."""
    text = """two (float[1,16,24,24] x) => (float[1,16,24,24] y) {
        [conv0] a = Conv<pads = [1, 1, 1, 1]>(x, w0)
        [relu0] b = Relu(a)
        [conv1] y = Conv<pads = [1, 1, 1, 1]>(b, w1)
    }"""
    path = saved(tmp_path / "two.onnx", text, **kernels(2, 16, 16, 3, 3))
    return Case(id="default", model=path, tune=TuneRules(trials=3), regions=RegionRules(by="fusion"))


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(root=tmp_path, backend="trtexec", output=Path("out"), cache_dir=Path("cache"), layout="")


@SEARCHED
def test_a_search_finds_the_faster_placement(install_trtexec, case, settings):
    install_trtexec("10.16")
    with closing(Session(settings)) as session:
        leaves = [region.nodes for region in session.regions(case) if region.type == "LEAF"]
        assert leaves == [("conv0", "relu0"), ("conv1",)], "regions are the fusions that trtexec reports"
        result = session.search(case)
    assert not result.unchanged
    assert result.winner.sites
    lines = (settings.root / "out" / "trials.jsonl").read_text().splitlines()
    trials = [json.loads(line) for line in lines]
    measured = [trial for trial in trials if trial.get("samples", {}).get("wall_ms")]
    assert measured
    assert all("unstable" in trial["samples"]["notes"][0] for trial in measured), "warnings are kept"


@SEARCHED
def test_the_best_model_of_each_region_builds_with_trtexec_alone(install_trtexec, case, settings):
    tool = install_trtexec("11.1")
    rules = TuneRules(trials=5, strategy="region", region_models=True, min_sqnr_db="none")
    regions = RegionRules(by="manual", manual=(("conv0", "relu0"), ("conv1",)))
    asked = replace(case, tune=rules, regions=regions)
    with closing(Session(replace(settings, backend_option=("trtexec.args=--maxAuxStreams=0",)))) as session:
        session.search(asked)
    folder = settings.root / "out" / "regions"
    rows = list(csv.DictReader((folder / "regions.csv").read_text().splitlines()))
    assert rows
    for number, row in enumerate(rows, 1):
        assert row["file"] == f"{number}.onnx"
        pairs = [n for n in onnx.load(folder / row["file"]).graph.node if n.op_type == "DequantizeLinear"]
        assert bool(pairs) == (int(row["pairs"]) > 0)
        script = folder / f"{number}.sh"
        done = subprocess.run(["sh", script], cwd="/", capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout
        words = tool.calls()[-1]
        assert words[0] == f"--onnx={number}.onnx"
        assert {"--useCudaGraph", "--stronglyTyped", "--maxAuxStreams=0"} <= {*words}
