from __future__ import annotations

from dataclasses import replace

import pytest
from sample_evidence import placed, sample_culprits, sample_lint, sample_parity_search, sample_survival

from qdqspec._core.registry import names
from qdqspec.testing.checks import CheckContract
from qdqspec.testing.records import cached_case, check_named, faster_case, params_of, sample_regression
from qdqspec.types import BuildEvidence, Evidence, Interval, RatioTest
from qdqspec.types.requests import BuildRequest

FASTER = faster_case().evidence
DIGITS = cached_case().evidence
LINTED = replace(FASTER, lint=sample_lint("tensorrt-11"))
SURVIVED = replace(FASTER, survival=sample_survival(24))
WIDE = Interval(median=1.7, low=1.5, high=1.9).inverse
TESTED = {"tuned": RatioTest(mean=WIDE, enclosing=WIDE)}
UNCERTAIN = replace(FASTER, latency=replace(FASTER.latency, tested=TESTED))


def bare(evidence: Evidence) -> Evidence:
    return replace(evidence, latency=None, parity=None, accuracy={}, size_bytes={}, pairs=(), node_ops={})


class TestLatency(CheckContract):
    check = check_named("latency")
    passing = ({"kind": "latency", "max_ms": 5}, FASTER)
    failing = ({"kind": "latency", "max_ms": {"onnxruntime": 4}}, FASTER)
    inconclusive = ({"kind": "latency", "max_ms": {"tensorrt": 4}}, FASTER)


class TestSpeedup(CheckContract):
    check = check_named("speedup")
    passing = ({"kind": "speedup", "min": 1.3}, FASTER)
    failing = ({"kind": "speedup", "min": 2}, FASTER)
    inconclusive = ({"kind": "speedup", "min": 1.75}, UNCERTAIN)


class TestParity(CheckContract):
    check = check_named("parity")
    passing = ({"kind": "parity", "min_sqnr_db": 20, "max_steps": 4, "min_agreement": "99%"}, FASTER)
    failing = (
        {"kind": "parity", "min_cosine": 0.9999, "runtime": {"min_sqnr_db": 40}},
        replace(FASTER, culprits=sample_culprits()),
    )
    inconclusive = ({"kind": "parity", "min_slice_sqnr_db": 20}, FASTER)


SEARCHED = {"kind": "parity", "min_sqnr_db": 20, "search": {"examples": 200, "seconds": 30}}


def searched(*, found: bool) -> Evidence:
    key = params_of(**SEARCHED).evidence_key  # type: ignore[attr-defined]  # its parameters have this attribute
    return replace(FASTER, parity_search={key: sample_parity_search(found=found)})


class TestParitySearch(CheckContract):
    check = check_named("parity")
    passing = (SEARCHED, searched(found=False))
    failing = (SEARCHED, searched(found=True))
    inconclusive = (SEARCHED, FASTER)


class TestAccuracy(CheckContract):
    check = check_named("accuracy")
    passing = ({"kind": "accuracy", "min": "97%", "max_drop": "1%"}, DIGITS)
    failing = ({"kind": "accuracy", "max_drop": 0.001}, DIGITS)
    inconclusive = ({"kind": "accuracy", "metric": "recall", "min": 0.9}, DIGITS)


class TestPlacement(CheckContract):
    check = check_named("placement")
    passing = ({"kind": "placement", "require": ["Conv"], "forbid": ["softmax"], "max_pairs": 12}, FASTER)
    failing = ({"kind": "placement", "forbid": ["fire1/*"]}, FASTER)
    inconclusive = ({"kind": "placement", "require": ["Conv"]}, bare(FASTER))


class TestSize(CheckContract):
    check = check_named("size")
    passing = ({"kind": "size", "max_bytes": "2MiB", "max_ratio": 0.3}, FASTER)
    failing = ({"kind": "size", "max_ratio": 0.2}, FASTER)
    inconclusive = ({"kind": "size", "max_bytes": 4096}, bare(FASTER))


class TestSurvival(CheckContract):
    check = check_named("survival")
    passing = ({"kind": "survival", "through": ["constant-folding", "onnxruntime-extended"]}, SURVIVED)
    failing = ({"kind": "survival", "through": ["onnxslim", "onnxscript", "constant-folding"]}, SURVIVED)
    inconclusive = ({"kind": "survival", "through": ["onnxslim", "constant-folding"]}, SURVIVED)


class TestRegression(CheckContract):
    check = check_named("regression")
    passing = ({"kind": "regression", "max": "5%"}, replace(FASTER, regression=sample_regression(0.004)))
    failing = ({"kind": "regression"}, replace(FASTER, regression=sample_regression(0.098, looks=2)))
    inconclusive = ({"kind": "regression"}, replace(FASTER, regression=sample_regression(0.045, looks=2)))


class TestLint(CheckContract):
    check = check_named("lint")
    passing = ({"kind": "lint", "target": ["onnxruntime-cpu"], "strict": True}, LINTED)
    failing = ({"kind": "lint", "target": ["onnxruntime-cpu", "tensorrt-11"]}, LINTED)
    inconclusive = ({"kind": "lint", "target": "tensorrt-10"}, LINTED)


def sample_builds(*builds: BuildEvidence) -> Evidence:
    found = {f"{build.backend}:{build.target}": build for build in builds}
    return replace(FASTER, builds=found)


def rtx(target: str, narrow: int = 0, **facts: str) -> BuildEvidence:
    counts = {"kernels": 49, "narrow": narrow, "heavy": 26} if narrow else {}
    return BuildEvidence(backend="tensorrt-rtx", target=target, **facts, **counts)


class TestBuilds(CheckContract):
    check = check_named("builds")
    passing = (
        {"kind": "builds", "backend": "tensorrt-rtx", "for": ["SM86", "SM120"], "min_8bit": "80%"},
        sample_builds(rtx("SM86", 24), rtx("SM120", 26)),
    )
    failing = (
        {"kind": "builds", "backend": "tensorrt-rtx", "for": ["SM86", "SM120"]},
        sample_builds(
            rtx(
                "SM86",
                refused="the compiler refuses the model for SM86 at node 'fire2/concat_1': fp8 is not supported",
                cure="leave the named node in float",
            ),
            rtx("SM120", 26),
        ),
    )
    inconclusive = (
        {"kind": "builds", "backend": "tensorrt-rtx", "for": "SM86"},
        sample_builds(rtx("SM86", missing="it is not installed", cure="pip install 'qdqspec[tensorrt-rtx]'")),
    )


def test_a_missing_backend_is_skipped_with_the_command_that_installs_it() -> None:
    values, evidence = TestBuilds.inconclusive
    verdict = check_named("builds").judge(params_of(**values), evidence)
    assert verdict.command == "pip install 'qdqspec[tensorrt-rtx]'"


def with_build(build: BuildEvidence) -> Evidence:
    return replace(FASTER, builds={BuildRequest().key: build})


class TestPartition(CheckContract):
    check = check_named("partition")
    passing = (
        {"kind": "partition", "max_cpu_nodes": 0, "max_partitions": 1, "min_integer": {"Conv": "all"}},
        with_build(placed(("Conv", "npu", True), ("Softmax", "npu", False))),
    )
    failing = (
        {"kind": "partition", "max_cpu_nodes": 0, "forbid_cpu": ["LayerNormalization"]},
        with_build(
            placed(("Conv", "npu", True), ("LayerNormalization", "cpu", False), ("Conv", "npu-2", False))
        ),
    )
    inconclusive = ({"kind": "partition", "max_cpu_nodes": 0}, FASTER)


SUITES = (
    TestLatency, TestSpeedup, TestParity, TestParitySearch, TestAccuracy, TestPlacement, TestSize, TestSurvival,
    TestRegression, TestLint, TestBuilds, TestPartition,
)  # fmt: skip


def test_every_check_has_a_contract() -> None:
    assert set(names("check")) <= {suite.passing[0]["kind"] for suite in SUITES}


@pytest.mark.parametrize("outcome", ["pass", "fail", "inconclusive"])
def test_the_messages_of_checks(outcome: str, golden) -> None:
    lines = []
    for suite in SUITES:
        verdict = suite().judged(outcome)
        lines += [f"{suite.passing[0]['kind']}: {verdict.headline}"]
        for section in verdict.sections:
            lines += [f"  {section.title}: {section.text}".rstrip(": ")]
            lines += [f"    {' | '.join(row)}" for row in (section.headers, *section.rows) if row]
        lines += [f"  {verdict.advice}"] if verdict.advice else []
    golden(f"checks/{outcome}.txt", "\n".join(lines) + "\n")
