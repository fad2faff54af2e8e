"""Sessions on the simulated device: written files, cache, modes, resume, and user files that stay unchanged."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
from chains import chain_model
from filelock import FileLock
from sessions import Open, change_builds, contents, count_builds, interrupted
from written_cases import check_of

from qdqspec.accuracy.corrections.find import FoundCorrections
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.session import Session
from qdqspec.backends.base import BuildOptions
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.isolation.isolated import RECENT
from qdqspec.errors import BackendError, DataError, ModelError, OutputError, StateError
from qdqspec.types import (
    Case,
    CorrectionGain,
    Data,
    DeviceKey,
    Inputs,
    ParityEvidence,
    PatternRules,
    Progress,
    QuantizeRules,
    RegionRules,
    TensorParity,
)

WRITTEN = {
    "reference.onnx", "tuned_raw.onnx", "tuned.onnx", "trials.jsonl", "scheme.json", "layers.csv",
    "patterns.yaml",
}  # fmt: skip
ALL = frozenset({"latency", "parity", "size"})


@pytest.fixture
def case(case: Case) -> Case:
    checks = (check_of("speedup", min=1.01),)
    return replace(case, tune=replace(case.tune, preset="extensive"), checks=checks)


def lines(session: Session, case: Case) -> list[dict]:
    journal = session.output(case) / "trials.jsonl"
    return [json.loads(line) for line in journal.read_text().splitlines()]


# ---- results and files of a run ------------------------------------------------------------------


def test_a_run_finds_a_faster_placement_writes_its_files_and_reports_each_trial(
    open_session: Open, case: Case, project: Path
) -> None:
    before = contents(project)
    session, seen = open_session(), list[Progress]()
    session.watch = seen.append
    evidence = session.evidence(case, ALL)
    assert contents(project) == before, "files of the user"
    assert not evidence.search.unchanged
    assert evidence.latency.speedup.low > 1
    assert evidence.latency.provenance.source == "measured"
    assert evidence.parity.sqnr_db > 15
    assert len(evidence.pairs) == len(evidence.search.winner.sites)
    assert contents(session.output(case)).keys() >= WRITTEN
    onnx.checker.check_model(session.output(case) / "tuned.onnx", full_check=True)
    journal = lines(session, case)
    phases = [line["phase"] for line in journal]
    assert phases[:2] == ["pure", "noise"]
    assert len([p for p in phases if p not in ("noise", "confirm")]) == evidence.search.total <= 6
    assert {line["role"] for line in journal if line["phase"] == "confirm"} >= {"reference", "winner"}
    assert [each.done for each in seen if not each.doing] == list(range(1, evidence.search.total + 1))
    steps = [progress.doing for progress in seen if progress.doing]
    assert steps[:3] == ["reading the model and its data", "checking the data", "calibrating"]
    assert steps.index("building the reference") < steps.index("timing candidate 1")
    assert any(step.startswith("timing fresh builds: build 1 of ") for step in steps)
    header, *_ = (session.output(case) / "layers.csv").read_text().splitlines()
    assert header == "model,kernel,op_type,milliseconds,nodes,tensors,boundary,integer"


def test_evidence_has_what_checks_request_with_parameters(open_session: Open, case: Case) -> None:
    checks = check_of("lint", target=["onnxruntime-cpu"]), check_of("survival", through=["constant-folding"])
    case = replace(case, checks=checks)
    session = open_session()
    evidence = session.evidence(case, frozenset({"lint"}))
    assert (evidence.lint.keys(), evidence.survival) == ({"onnxruntime-cpu"}, {})
    assert session.evidence(case, frozenset({"survival"})).survival.keys() == {"constant-folding"}


def test_a_search_that_expects_too_little_of_a_further_build_says_so(open_session: Open, case: Case) -> None:
    search = open_session().search(replace(case, tune=replace(case.tune, preset="default", trials=100)))
    assert search.ended_by == "expected gain below 1 %"
    assert re.search(
        r"ended after \d+ builds: less than 1 % of the time is expected of another", search.reason
    )


def test_nodes_with_which_no_placement_was_built_are_named(open_session: Open, case: Case) -> None:
    evidence = open_session({"fake.fail_rate": "1"}).evidence(case, ALL)
    assert evidence.search.unchanged
    named = "nodes left in floating point, as no model with them quantized was built, "
    assert [note for note in evidence.warnings if note.startswith(named) and "refuses this placement" in note]


def test_two_searches_with_one_seed_have_the_same_journal(
    open_session: Open, case: Case, tmp_path: Path
) -> None:
    """The times of builds differ, and the digests of lines, which contain them."""
    case, journals = replace(case, tune=replace(case.tune, trials=9)), []
    for name in ("first", "second"):
        words = {"fake.fail_rate": "0.2", "fake.seed": "5"}
        session = open_session(words, output=tmp_path / name, no_cache=True, seed=3)
        session.search(case)
        steady = [line | {"build_seconds": 0, "sum": ""} for line in lines(session, case)]
        journals.append(steady)
    assert journals[0] == journals[1]


# ---- cache --------------------------------------------------------------------------------------


def test_a_second_session_reads_the_winner_from_the_cache_and_writes_the_same_files(
    open_session: Open, case: Case, tmp_path: Path
) -> None:
    first, second = open_session(), open_session(output=tmp_path / "elsewhere")
    found, built = first.search(case), count_builds(second)
    second.output(case).mkdir(parents=True)
    (second.output(case) / "reference.onnx").write_bytes(b"of yesterday")
    evidence = second.evidence(case, ALL)
    assert evidence.search.provenance.source == "cached"
    assert evidence.search.winner == found.winner
    assert evidence.search.trials == found.trials
    assert {path.name for path in built} == {"chain.onnx", "tuned.onnx"}
    ours, theirs = (contents(session.output(case)) for session in (second, first))
    assert all(ours[name] == theirs[name] for name in WRITTEN - {"trials.jsonl"})
    assert len(lines(second, case)) == found.total


def test_a_cache_entry_of_another_process_is_kept_and_the_own_result_is_used(
    open_session: Open, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two concurrent searches with the same key: each of them selects the model that it has measured itself."""
    first, second = open_session(), open_session(output=case.model.parent / "elsewhere")
    first.search(case)
    other = first.work(case).find().folder
    (other / "scheme.json").write_bytes(b"of another search")
    monkeypatch.setattr(second._store, "put", lambda *_: other)
    second.search(case)
    ours = second.work(case).find()
    assert ours.folder == second.output(case)
    assert ours.model.is_file()


def test_without_a_cache_none_is_read_or_written(open_session: Open, case: Case, tmp_path: Path) -> None:
    session = open_session(no_cache=True)
    session.evidence(case, ALL)
    assert not (tmp_path / "root" / ".qdqspec").exists()
    assert contents(session.output(case)).keys() >= WRITTEN
    open_session().search(case)
    assert open_session(no_cache=True).search(case).provenance.source == "measured"


def test_a_changed_model_of_the_same_path_is_searched_again(open_session: Open, case: Case) -> None:
    session = open_session()
    first = session.evidence(case, frozenset())
    onnx.save(chain_model(seed=1), case.model)
    os.utime(case.model, (1, 1))  # the modification time must not matter
    second = session.evidence(case, frozenset())
    assert second.model_sha256 != first.model_sha256
    assert session.search(case) is second.search is not first.search


def test_the_cache_key_depends_on_all_inputs_of_a_search(
    open_session: Open, case: Case, models: Path, tmp_path: Path
) -> None:
    def key(settings: dict[str, Any] | None = None, **fields: Any) -> str:
        with closing(open_session(**(settings or {}))) as session:
            return session.work(replace(case, **fields)).prepared.key

    def key_of_scales(scale: str) -> str:
        file = tmp_path / "calibration.cache"
        file.write_text(f"TRT-8601-EntropyCalibration2\nx: {scale}\n")
        return key(inputs=replace(case.inputs, scales=file))

    np.savez(tmp_path / "data.npz", x=np.zeros((4, 8, 12, 12), np.float32))
    other = onnx.load(models / "digits_resnet.onnx")
    other.graph.doc_string = "another"
    onnx.save(other, tmp_path / "other.onnx")
    keys = [
        key(),
        key(model=tmp_path / "other.onnx"),
        key(inputs=replace(case.inputs, calibration=tmp_path / "data.npz")),
        key(inputs=replace(case.inputs, evaluation=tmp_path / "data.npz")),
        *map(key_of_scales, ("3c010a14", "3c010a15")),
        key({"device_key": lambda _: "w"}),
        key({"seed": 1}),
        key(quantize=QuantizeRules(calibration="percentile")),
        key(tune=replace(case.tune, trials=7)),
        *(key(model=tmp_path / "other.onnx", inputs=Inputs(batch=batch)) for batch in (2, 3)),
        key(patterns=PatternRules(deny=("Softmax",))),
        key(regions=RegionRules(max_nodes=3)),
    ]
    assert len({*keys}) == len(keys)
    assert key(checks=(), title="other", tags=("x",)) == key()


def found_again(session: Session, case: Case, *scales: float, apart: float = 1.0) -> tuple[str, str]:
    """The source of the winner in a session, and its warnings.

    The cached winner is slower by one factor of ``scales`` per measurement, of which the last is repeated; without
    factors it is not built any more. In the second measurement its builds differ by the factor ``apart``.
    """
    built = itertools.count()

    def change(model: Path, options: BuildOptions) -> BuildOptions:
        if model.name != "tuned.onnx":
            return options
        if not scales:
            raise BackendError("no kernel")
        number = next(built)
        measurement = (number >= 2) + (number >= 2 + 4)  # builds of the first and the second one
        chosen = scales[min(measurement, len(scales) - 1)]
        if measurement:
            chosen *= apart ** (number % 2 - 0.5)
        return replace(options, extra={**options.extra, "fake.scale": str(chosen)})

    change_builds(session, change)
    evidence = session.evidence(case, frozenset())
    return evidence.search.provenance.source, " ".join(evidence.warnings)


def test_a_cached_winner_slower_twice_is_tuned_again_unless_in_ci(open_session: Open, case: Case) -> None:
    winner = open_session().search(case).winner
    in_ci = open_session(in_ci=True)
    source, warnings = found_again(in_ci, case, 3)
    assert source == "cached"
    assert in_ci.search(case).winner == winner
    assert "it is kept, since no search is started in CI. Tune again with --qdq-retune" in warnings
    session, lines = open_session(), []
    session.watch = lambda progress: lines.append(progress.waiting)
    source, warnings = found_again(session, case, 3)
    assert source == "measured"
    assert "slower than the reference in two measurements: " in warnings
    waited = [line for line in lines if line]
    assert [line for line in waited if line.endswith(": tuning again")] == waited[:1], "before the search"
    assert "it was tuned again" in warnings
    assert found_again(open_session(in_ci=True, retune=True), case, 3)[0] == "measured"


@pytest.mark.parametrize("recovers", [True, False], ids=["faster", "inconclusive"])
def test_a_cached_winner_is_kept_after_one_slow_look(open_session: Open, case: Case, recovers: bool) -> None:
    """In the second measurement, the winner is as fast as before, or as fast as float with builds far apart."""
    latency = open_session().evidence(case, frozenset({"latency"})).latency
    second, apart = (1.0, 1.0) if recovers else (latency.speedup.median, 1.5)
    source, warnings = found_again(open_session(), case, 3, second, apart=apart)
    assert source == "cached"
    is_open = "inconclusive: the cached winner is neither proved faster nor proved slower" in warnings
    assert is_open is not recovers


def test_a_cached_winner_that_cannot_be_built_is_tuned_again(open_session: Open, case: Case) -> None:
    open_session().search(case)
    with pytest.raises(StateError, match="could not be built and run again: no kernel; no search is started"):
        found_again(open_session(in_ci=True), case)
    measuring = open_session(mode="measure")
    found_again(measuring, case)
    with pytest.raises(BackendError, match="tuned model could not be built and run again: no kernel"):
        measuring.evidence(case, ALL)
    source, warnings = found_again(open_session(), case)
    assert source == "measured"
    assert "could not be built and run again: no kernel; it was tuned again" in warnings


# ---- modes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["measure", "verify"])
def test_modes_that_do_not_search_need_a_known_winner(open_session: Open, case: Case, mode: str) -> None:
    """The error names what differs from a winner of the cache."""

    def unknown(case: Case) -> StateError:
        with pytest.raises(StateError, match="no winner is known") as caught:
            open_session(mode=mode).search(case)
        return caught.value

    error = unknown(case)
    assert (error.where, error.cure) == (str(case.model), "run it once with --qdq-mode=run")
    assert "the cache has" not in error.what
    open_session().search(case)
    other = replace(case, tune=replace(case.tune, trials=3))
    assert "the cache has one of other data, rules or options" in unknown(other).what
    proto = onnx.load(case.model)
    proto.graph.initializer[1].CopyFrom(chain_model(seed=1).graph.initializer[1])
    onnx.save(proto, case.model)
    changed = "1 node changed: Conv 'conv1' (weights); 1 constant changed"
    assert unknown(case).what.endswith(f"; the cache has one of another model: {changed}")


def test_mode_measure_times_the_known_winner_and_mode_verify_nothing(open_session: Open, case: Case) -> None:
    open_session().search(case)
    evidence = open_session(mode="measure").evidence(case, ALL)
    assert evidence.latency.speedup.low > 1
    assert evidence.search.provenance.source == "cached"
    session = open_session(mode="verify")
    change_builds(session, lambda _, options: replace(options, extra={**options.extra, "fake.raise": "time"}))
    verified = session.evidence(case, ALL)
    assert verified.latency is None
    assert verified.parity is not None


def test_mode_plan_builds_nothing(open_session: Open, case: Case) -> None:
    session = open_session(mode="plan")
    built = count_builds(session)
    text = session.planned(case).text
    assert text.startswith("4 units")
    assert "at most 6 builds" in text
    assert re.search(r"the search may take [\d.]+ s to [\d.]+ s: 6 builds, estimated from", text)
    assert "and 12 to confirm (48 more if a gain is close to its limit" in text
    front = replace(case, tune=replace(case.tune, objective="pareto"))
    assert "and 36 to confirm" in session.planned(front).text  # includes eight placements of the front
    short = replace(case, tune=replace(case.tune, minutes=0.01))
    assert "tune.minutes ends the search after 0.6 s" in session.planned(short).text
    nothing = session.planned(replace(case, quantize=QuantizeRules(format="int8_b256"))).text
    assert nothing == "no operator can be quantized to int8_b256 here: there is nothing to search"
    assert built == []
    assert not session.output(case).exists()
    open_session().search(case)
    assert "which is timed again; with --qdq-retune 4 units" in open_session(mode="plan").planned(case).text
    for anew in ({"retune": True}, {"no_cache": True}):
        assert open_session(mode="plan", **anew).planned(case).text.startswith("4 units")


# ---- a scheme of an earlier run -----------------------------------------------------------------


def test_a_known_scheme_is_replayed(open_session: Open, case: Case) -> None:
    first = open_session().search(case)
    other = next(t for t in first.trials if t.placement.sites and t.placement != first.winner)
    evidence = open_session(scheme=other.placement.digest[:10]).evidence(case, ALL)
    assert evidence.search.winner == other.placement
    assert evidence.search.provenance.source == "replayed"
    assert evidence.latency is not None
    reference = open_session(scheme=first.trials[0].placement.digest).search(case)
    assert (reference.unchanged, reference.winner) == (True, first.trials[0].placement)
    for scheme, message in (("nothing", "has scheme nothing"), ("", "several")):
        with pytest.raises(StateError, match=message):
            open_session(scheme=scheme).search(case)


# ---- resume -------------------------------------------------------------------------------------


def test_an_interrupted_search_keeps_its_corrections(
    open_session: Open, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Prepared] = []
    gain = CorrectionGain(name="bits", before_db=20.0, after_db=20.5, changed=3, taken=False)

    def find(prepared: Prepared) -> FoundCorrections:
        calls.append(prepared)
        return FoundCorrections(gains=(gain,))

    monkeypatch.setattr("qdqspec.app.preparation.prepare.find_case_corrections", find)
    interrupted(open_session(), case, 3)
    assert len(calls) == 1
    found = open_session().search(case)
    assert found.corrections == (gain,)
    other = next(t for t in found.trials if t.placement.sites and t.placement != found.winner)
    replayed = open_session(scheme=other.placement.digest)
    assert replayed.search(case).winner == other.placement
    assert replayed.work(case).prepared.corrections.gains == (gain,)
    assert len(calls) == 1
    open_session(retune=True).search(case)  # a new search finds new corrections
    assert len(calls) == 2


def test_an_interrupted_search_continues_after_the_last_trial(open_session: Open, case: Case) -> None:
    session, after = open_session(), 3
    interrupted(session, case, after)
    torn = (session.output(case) / "trials.jsonl").read_bytes()
    resumed, messages = open_session(), list[str]()
    resumed.watch = lambda progress: messages.append(progress.waiting)
    search = resumed.search(case)
    (continued,) = filter(None, messages)  # one message about the continuation
    assert re.fullmatch(rf"continues from {after + 1} builds in .*trials\.jsonl", continued)
    assert (resumed.output(case) / "trials.jsonl").read_bytes().startswith(torn)
    added = lines(resumed, case)[len(torn.splitlines()) :]
    built = [line["placement"] for line in added if line["phase"] != "confirm"]
    assert built == [trial.placement.digest for trial in search.trials[after:]]


def test_a_search_whose_results_could_not_be_written_is_not_repeated(
    open_session: Open, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, full = open_session(), Mock(side_effect=OutputError("no space left"))
    with monkeypatch.context() as patch:
        patch.setattr("qdqspec.app.session.pipeline.write_results", full)
        with pytest.raises(OutputError):
            session.search(case)
    resumed = open_session()
    built = count_builds(resumed)
    assert not resumed.search(case).unchanged
    assert len(built) <= 3 * 4


def test_a_failed_search_is_not_repeated_for_other_checks(open_session: Open, case: Case) -> None:
    session, errors = open_session({"fake.raise": "build"}), []
    built = count_builds(session)
    for _ in range(2):
        with pytest.raises(BackendError) as caught:
            session.search(case)
        errors.append((str(caught.value), len(built)))
    assert errors[0] == errors[1]
    assert len([path for path in built if path.name == "chain.onnx"]) <= 1


def test_the_journal_of_another_device_is_renamed_with_a_warning(
    open_session: Open, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session()
    interrupted(session, case, 2)
    foreign = (session.output(case) / "trials.jsonl").read_bytes()
    monkeypatch.setattr(FakeDevice, "device", lambda *_: DeviceKey(key="other-device"))
    resumed = open_session()
    evidence = resumed.evidence(case, frozenset())
    (warning,) = [text for text in evidence.warnings if "set aside" in text]
    assert "device was " in warning
    assert (resumed.output(case) / "trials.previous.jsonl").read_bytes() == foreign
    assert "noise" in {line["phase"] for line in lines(resumed, case)}


# ---- bad input: one error that names the file ---------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("chain.onnx", ModelError), ("data.npz", DataError)])
@pytest.mark.parametrize("content", [None, b"this is no such file"])
def test_invalid_input_is_one_error_that_names_the_file(
    open_session: Open, case: Case, project: Path, name: str, kind: type[Exception], content: bytes | None
) -> None:
    (project / name).unlink()
    if content is not None:
        (project / name).write_bytes(content)
    for mode in ("run", "plan"):
        session = open_session(mode=mode)
        with pytest.raises(kind) as caught:
            session.planned(case) if mode == "plan" else session.evidence(case, ALL)
        assert str(project / name) in str(caught.value)


def test_a_second_run_waits_for_the_first_and_uses_its_result(open_session: Open, case: Case) -> None:
    first, second, waits = open_session(), open_session(), list[Progress]()
    found = first.search(case)
    lock = FileLock(first.output(case) / ".lock")

    def watch(progress: Progress) -> None:
        if progress.waiting:
            waits.append(progress)
            lock.release(force=True)  # the other run ends

    second.watch = watch
    with lock:
        taken = second.search(case)
    assert waits[0].waiting.startswith(f"waits for the run that writes to {first.output(case)}")
    assert waits[0].case == case.name
    assert taken.provenance.source == "cached"
    assert taken.winner == found.winner


def test_an_output_folder_that_is_a_file_or_has_the_input_is_an_error(
    open_session: Open, case: Case, project: Path
) -> None:
    """The output would overwrite a model that has the name of an output file."""
    with pytest.raises(OutputError, match=r"data\.npz"):
        open_session(output=project / "data.npz").search(case)
    shutil.move(project / "chain.onnx", project / "tuned.onnx")
    own = replace(case, model=project / "tuned.onnx")
    before = contents(project)["tuned.onnx"]
    with pytest.raises(OutputError, match="overwrite the input"):
        open_session(output=project, layout="").search(own)
    assert contents(project)["tuned.onnx"] == before


# ---- child processes ----------------------------------------------------------------------------


def children() -> set[int]:
    """The child processes of this one including zombies, without idle ones that the next backend may use."""
    RECENT.clear()
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() or int(fields[1]) in found:
            found.add(int(stat.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("stage", ["end", "crash", "interrupt", "disk"])
def test_closing_a_session_ends_its_child_processes(
    open_session: Open, case: Case, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    before = children()
    if stage == "disk":
        full = Mock(side_effect=OutputError("no space left"))
        monkeypatch.setattr("qdqspec.app.preparation.files.save_model", full)
    with closing(open_session({"fake.crash": "time"} if stage == "crash" else {})) as session:
        if stage == "interrupt":
            interrupted(session, case, 2)
        elif stage == "end":
            session.evidence(case, ALL)
            assert len(children() - before) == 1  # the process that engines are forked from
        else:
            with pytest.raises((BackendError, OutputError), match=r"not run without any Q/DQ|no space left"):
                session.search(case)
    assert children() == before


def test_a_model_below_its_limit_is_warned_about(open_session: Open, case: Case) -> None:
    """Data or runtime may have changed after it was selected."""
    work = open_session().work(case)
    output = TensorParity(name="y", sqnr_db=19.9, cosine=0.9, max_abs=1.0, max_steps=9.0)
    work.parity = ParityEvidence(outputs=(output,), samples=9, data="evaluation")
    found = "on all evaluation data the tuned model has 19.9 dB, below the limit of 20 dB (tune.min_sqnr_db)"
    assert found in work.warnings


def test_a_session_computes_anew_what_depends_on_rewritten_files(
    open_session: Open, case: Case, project: Path, tmp_path: Path
) -> None:
    """But not what depends on its own results, which a search may start from."""
    session, data, labels, file = (
        open_session(),
        project / "data.npz",
        project / "l.npy",
        project / "given.json",
    )
    own = tmp_path / "root" / "reports" / "patterns.yaml"
    own.parent.mkdir(parents=True)
    np.save(labels, np.zeros(4, np.int64))
    for each, path in (
        *(
            (replace(case, inputs=Inputs(calibration=project / name)), data)
            for name in ("data.npz", "", "*.npz")
        ),
        (replace(case, inputs=Inputs(evaluation=Data(path=data, labels=labels))), labels),
        (replace(case, inputs=replace(case.inputs, scales=file)), file),
        (replace(case, regions=replace(case.regions, by="fusion", graph=file)), file),
        (replace(case, tune=replace(case.tune, start_from=(file,))), file),
        (replace(case, tune=replace(case.tune, start_from=(own,))), own),
    ):
        before = session.work(each)
        with path.open("ab") as written:
            written.write(b" ")
        assert (session.work(each) is before) == (path == own)
        assert session.work(each) is session.work(each)


def test_a_check_with_other_limits_is_judged_anew(open_session: Open, case: Case) -> None:
    session, found = open_session(), []
    for limit in (0.0, 300.0):
        check = check_of("parity", min_sqnr_db=limit)
        found.append(session.judge(replace(case, checks=(check,)), check).verdict.outcome)
    assert found == ["pass", "fail"]


def test_a_session_computes_anew_what_depends_on_another_metric(open_session: Open, case: Case) -> None:
    def closed(factor: float) -> Callable[..., float]:
        return lambda _, labels: factor * len(labels)

    def by_keyword(factor: float) -> Callable[..., float]:
        return lambda _, labels, *, factor=factor: factor * len(labels)

    def with_lists(factor: float) -> Callable[..., float]:
        factors, array = [factor, {"a": factor}], np.array([factor])

        def metric(outputs: Any, labels: Any) -> float:
            return array[0] * factors[0] * len(labels) if outputs else metric(labels, labels)

        return metric

    def as_partial(factor: float) -> Callable[..., float]:
        return partial(with_lists(1.0), factor=factor)

    session = open_session()
    for metric_of in (closed, by_keyword, with_lists, as_partial):
        one, same, other = (replace(case, metrics={"m": metric_of(factor)}) for factor in (1.0, 1.0, 2.0))
        assert session.work(one) is session.work(same)
        assert session.work(one) is not session.work(other)
