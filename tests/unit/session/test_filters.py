"""Nodes denied by a spec stay float in all builds, and invalid patterns are errors with their positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from graph_text import kernels
from written_cases import normal, written_case

from qdqspec import load_spec
from qdqspec.app.preparation.prepare import require_patterns
from qdqspec.app.session import Session
from qdqspec.errors import BackendError, PlacementError, SpecError
from qdqspec.graph.model import load_model
from qdqspec.qdq.import_qdq import placement_for
from qdqspec.search.base import Proposal
from qdqspec.types import Case, PatternRules, Placement, TuneRules

WORDS = ("fake.run_noise=0.005", "fake.wall_noise=0.01", "fake.build_noise=0.002")
DENIED = {"conv1", "add"}
RULES = {
    "denied": PatternRules(deny=("Add",), exclude=("conv1",)),
    "not allowed": PatternRules(allow=("Conv",), include=("conv[0345]",), deny=("Add",), exclude=("*1",)),
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Five convolutions and a residual, all faster when quantized."""
    text = """net (float[1,8,24,24] x) => (float[1,8,24,24] y) {
      [conv0] a = Conv<pads = [1, 1, 1, 1]>(x, w0)  [conv3] b = Conv<pads = [1, 1, 1, 1]>(a, w1)
      [conv1] c = Conv<pads = [1, 1, 1, 1]>(b, w2)  [add] d = Add(b, c)
      [conv4] e = Conv<pads = [1, 1, 1, 1]>(d, w3)  [conv5] y = Conv<pads = [1, 1, 1, 1]>(e, w4) }"""
    data, weights = {"x": normal(2, 8, 24, 24)}, kernels(5, 8, 8, 3, 3)
    return written_case(tmp_path_factory.mktemp("net"), text, data, TuneRules(trials=12), **weights)


@pytest.fixture(scope="module")
def outputs(case: Case) -> Path:
    """The output of a run without filters, which has every kind of file that a search can start from."""
    root = case.model.parent
    with Session(backend="fake", root=root, output=Path("free"), backend_option=WORDS, layout="") as session:
        session.search(case)
        study = session.study(case)
        study.export(root / "free" / "everything.onnx", study.space.resolve(study.space.everything()))
        study.close()
    return root / "free"


def quantized_nodes(placement: Placement) -> set[str]:
    """The nodes that read a quantized tensor."""
    return {end.node for site in placement.sites for end in site.consumers}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("strategy", ["attribution", "region"])
def test_no_tried_placement_quantizes_a_denied_node(
    case: Case, outputs: Path, tmp_path: Path, strategy: str, rules: str
) -> None:
    files = [outputs / name for name in ("everything.onnx", "patterns.yaml", "scheme.json", "trials.jsonl")]
    assert quantized_nodes(placement_for(load_model(case.model), load_model(files[0]))[0]) >= DENIED
    tune = replace(case.tune, strategy=strategy, start_from=tuple(files))
    filtered = replace(case, patterns=RULES[rules], tune=tune)
    words = {"output": Path(strategy), "backend_option": WORDS, "layout": ""}
    with Session(backend="fake", root=tmp_path, **words) as session:
        trials = session.search(filtered).trials
    read = set().union(*(quantized_nodes(trial.placement) for trial in trials))
    assert {"conv0", "conv4"} <= read  # other nodes are quantized
    assert DENIED.isdisjoint(read)
    assert all(trial.ok or "patterns:" not in str(trial.error) for trial in trials)
    tuned = load_model(tmp_path / strategy / "tuned.onnx")
    assert DENIED.isdisjoint(quantized_nodes(placement_for(load_model(case.model), tuned)[0]))


@pytest.fixture
def everything(case: Case) -> Placement:
    """The placement of full quantization without filters."""
    with Session(backend="fake", root=case.model.parent) as session, session.study(case) as study:
        return study.space.resolve(study.space.everything())


@pytest.mark.parametrize(("rules", "part"), [("denied", ()), ("not allowed", ("conv1", "add"))])
def test_a_denied_placement_of_the_user_fails_without_a_build(
    case: Case, everything: Placement, tmp_path: Path, rules: str, part: tuple[str, ...]
) -> None:
    filtered = replace(case, patterns=RULES[rules])
    with (
        Session(backend="fake", root=tmp_path, backend_option=WORDS) as session,
        session.study(filtered) as study,
    ):
        trial = study.evaluate(Proposal(placement=everything, phase="mine", subgraph=part))
        assert trial.status == "failed"
        assert "an input of node 'add', which patterns: keeps in floating point" in str(trial.error)
        with pytest.raises(BackendError, match="cannot be the one to beat"):
            study.commit(everything)
        with pytest.raises(PlacementError, match="is no unit that can be labelled"):
            study.evaluate({"conv1": "in+out"})
        assert study.evaluate(study.space.everything()).ok
        assert DENIED.isdisjoint(quantized_nodes(study.confirm().result.winner))


# ---- invalid patterns -----------------------------------------------------------------------------

SPEC = """\
qdqspec: 1
model: m.onnx
patterns:
  allow: ["Conv > Relu", "Cnov > Relu"]
  deny: [softmax, "Conv > (Relu"]
checks: [{kind: speedup, min: 1}]
"""


def error_of(text: str, folder: Path) -> SpecError:
    path = folder / "a.qdq.yaml"
    path.write_text(text, encoding="utf-8")
    (case,) = load_spec(path).cases()
    with pytest.raises(SpecError) as caught:
        require_patterns(case)
    return caught.value


def test_all_invalid_patterns_are_reported_each_with_a_caret(tmp_path: Path) -> None:
    error = error_of(SPEC, tmp_path)
    assert [problem[:2] for problem in error.problems] == [(4, 27), (5, 10), (5, 27)]
    lines = str(error).splitlines()
    assert "a.qdq.yaml:4:27: unknown operator 'Cnov' (did you mean 'Conv'?)" in lines[0]
    assert lines[3].index("^") == lines[2].index("Cnov")
    assert "did you mean 'Softmax'?" in str(error)
    escaped = error_of(SPEC.replace('"Cnov > Relu"', '"Cn\\u006fv > Relu"'), tmp_path)
    assert "unknown operator 'Cnov'" in str(escaped)
