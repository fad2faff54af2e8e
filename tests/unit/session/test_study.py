"""Studies on the simulated device: single steps, user strategies and regions, saving and resuming."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import saved
from sessions import Open as OpenSession
from written_cases import normal

from qdqspec.app.session import Session
from qdqspec.app.session.study import Study
from qdqspec.errors import ConfigError, StateError
from qdqspec.search.base import Proposal, SearchSetup
from qdqspec.types import NO_PAIRS as NOTHING, Consumer, Placement, Site, Trial

TEXT = """net (float[1,8,12,12] x) => (float[1,8] y) {
  a = Conv<pads = [1, 1, 1, 1]>(x, w)  b = Relu(a)  c = Conv<pads = [1, 1, 1, 1]>(b, w)
  d = Add(b, c)  e = Conv<pads = [1, 1, 1, 1]>(d, w)  h = GlobalAveragePool(e)  i = Flatten(h)  y = MatMul(i, g) }"""
Open = Callable[..., Study]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    weights = {"w": normal(8, 8, 3, 3, deviation=0.2), "g": normal(8, 8, deviation=0.2, seed=1)}
    return saved(tmp_path / "net.onnx", TEXT, ir_version=8, **weights)


@pytest.fixture
def session(open_session: OpenSession) -> Session:
    return open_session(backend_option=("fake.run_noise=0", "fake.wall_noise=0", "fake.build_noise=0"))


@pytest.fixture
def open_study(session: Session, model: Path) -> Iterator[Open]:
    opened: list[Study] = []

    def open_it(**words) -> Study:
        study = session.study(model, **{"trials": 6, **words})
        opened.append(study)
        return study

    yield open_it
    for study in opened:
        study.close()


class Everything:
    """A strategy that proposes full quantization only."""

    def __init__(self, setup: SearchSetup, random: np.random.Generator) -> None:
        self.waiting = [Proposal(placement=setup.space.resolve(setup.space.everything()), phase="all")]

    def ask(self, n: int = 1) -> Sequence[Proposal]:
        batch, self.waiting = self.waiting[:n], self.waiting[n:]
        return batch

    def tell(self, trials: Sequence[Trial]) -> None:
        pass

    def done(self) -> bool:
        return not self.waiting


# ---- the loop -----------------------------------------------------------------------------------


def test_steps_of_a_study_run_the_search_of_tune(session: Session, model: Path, open_study: Open) -> None:
    study = open_study()
    while proposals := study.ask():
        built = study.build(proposals[0])
        assert built.ok
        trial = study.measure(built)
        study.tell(trial)
    tuned = [(t.phase, t.placement) for t in session.tune(model, trials=6).trials]
    assert [(t.phase, t.placement) for t in study.trials] == tuned
    assert [(t.phase, t.placement) for t in open_study()] == tuned
    assert [t.number for t in study.trials] == list(range(len(tuned)))
    assert list(study) == []
    assert not study.ask(), "the search has ended"


# ---- requests of the caller ----------------------------------------------------------------------


def test_a_strategy_receives_results_of_its_proposals_only(open_study: Open) -> None:
    study = open_study(strategy=Everything)
    own = study.evaluate(study.space.uniform("in-only"))
    assert study.evaluate(study.space.uniform("in-only")) is own, "it is not built again"
    study.tell(own)
    received = [*study]
    assert [t.phase for t in received] == ["all"]
    assert [t.phase for t in study.trials] == ["own", "own", "all"]


def test_the_best_placement_is_exported_confirmed_and_replaced_by_a_committed_one(
    open_study: Open, tmp_path: Path, model: Path
) -> None:
    study = open_study()
    list(study)
    onnx.checker.check_model(study.export(tmp_path / "out" / "best.onnx"), full_check=True)
    scheme = json.loads(study.export(tmp_path / "best.json").read_text())
    assert scheme["digest"] == study.best.placement.digest
    assert onnx.load(study.export(tmp_path / "none.onnx", NOTHING)) == onnx.load(model)
    tuned = study.confirm()
    assert tuned.result.winner.digest in {study.best.placement.digest, NOTHING.digest, *tuned.intervals}
    assert tuned.latency.builds == 3
    trial = study.commit({})
    assert study.best is trial
    assert (trial.phase, trial.placement, trial.ratio) == ("commit", NOTHING, 1.0)
    again = study.evaluate(study.space.resolve(study.space.everything()))
    assert again.number < trial.number  # measured before, so it is not raced again


# ---- user strategies, user regions, filters --------------------------------------------------------


@pytest.mark.parametrize("kind", ["class", "object", "function"])
def test_any_object_that_proposes_and_receives_results_is_a_strategy(open_study: Open, kind: str) -> None:
    def make(setup: SearchSetup, random: np.random.Generator) -> Everything:
        return Everything(setup, random)

    setup = SearchSetup(space=open_study().space)
    given = {"class": Everything, "object": make(setup, np.random.default_rng(0)), "function": make}
    study = open_study(strategy=given[kind])
    assert [t.phase for t in study] == ["all"]
    assert study.trials[0].placement == NOTHING
    name = make.__qualname__ if kind == "function" else "Everything"
    assert study.confirm().result.strategy == name


def test_strategies_and_regions_can_be_given_by_name(open_study: Open) -> None:
    assert {t.phase for t in open_study(strategy="exhaustive", trials=6)} >= {"pure", "exhaustive"}
    study = open_study(regions=[["Conv#0", "Relu#1"], ["Conv#2"]])
    leaves = [region.nodes for region in study.regions if region.type == "LEAF"]
    assert {("Conv#0", "Relu#1"), ("Conv#2",)} <= {*leaves}
    with pytest.raises(ConfigError, match="did you mean 'region'"):
        open_study(strategy="regoin")


# ---- saving and loading ----------------------------------------------------------------------------


def test_a_saved_study_continues_after_its_trials(session: Session, open_study: Open, tmp_path: Path) -> None:
    whole = [t.placement for t in open_study()]
    study = open_study()
    for trial in study:
        if trial.number == 2:
            break
    own = study.evaluate({study.space.units[1].id: study.space.units[1].full})
    committed = study.commit({})
    folder = study.save(tmp_path / "saved")
    study.close()
    with Study.load(folder, session=session) as loaded:
        assert [t.placement for t in loaded.trials] == [*whole[:3], own.placement, committed.placement]
        assert loaded.best.placement == NOTHING
        asked = [t.placement for t in loaded]
        assert not set(asked) & set(whole[:3])
    lines = (folder / "trials.jsonl").read_text().splitlines()
    assert len(lines) == len(loaded.trials) + 1, "the noise is stored"


def test_loading_a_study_needs_its_model_strategy_and_seed(
    open_study: Open, session: Session, model: Path, tmp_path: Path
) -> None:
    study = open_study(strategy=Everything)
    list(study)
    folder = study.save(tmp_path / "saved")
    with pytest.raises(StateError, match="is not registered"):
        Study.load(folder, session=session)
    with Session(session.settings, seed=9) as other, pytest.raises(StateError, match="seed was 0 and is 9"):
        Study.load(folder, session=other, strategy=Everything)
    with Study.load(folder, session=session, strategy=Everything) as loaded:
        assert len(loaded.trials) == 2
        assert list(loaded) == []
    proto = onnx.load(model)
    proto.graph.initializer[0].raw_data = bytes(len(proto.graph.initializer[0].raw_data))[:-1] + b"\x01"
    onnx.save(proto, model)
    with Session(session.settings) as other, pytest.raises(StateError, match="another run: model_sha256 was"):
        Study.load(folder, session=other, strategy=Everything)


def test_a_missing_or_changed_study_is_an_error(open_study: Open, tmp_path: Path) -> None:
    """A file must not make a session load native code or write to another folder."""
    folder = open_study().save(tmp_path / "saved")
    content = json.loads((folder / "study.json").read_text())
    settings = {**content["settings"], "plugin": ["evil.so"]}
    for changed in ({**content, "schema_version": 9}, {**content, "settings": settings}):
        (folder / "study.json").write_text(json.dumps(changed))
        with pytest.raises(StateError, match="the study is damaged or of another version"):
            Study.load(folder)
    (folder / "study.json").unlink()
    with pytest.raises(StateError, match="there is no study here"):
        Study.load(folder)


@pytest.mark.usefixtures("processes")
def test_closing_a_study_ends_its_processes(session: Session, model: Path) -> None:
    with session.study(model, trials=3) as study:
        list(study)
    study.close()
    assert len(study.trials) == 3
    assert study.best is not None
    uses = (study.ask, lambda: next(iter(study)), lambda: study.evaluate({}), study.confirm)
    for use in (*uses, lambda: study.rehearse({})):
        with pytest.raises(StateError, match="the study is closed"):
            use()


def test_a_candidate_is_rehearsed_without_a_build(open_study: Open) -> None:
    study = open_study()
    everything = study.space.everything()
    found, nothing = study.rehearse(everything), study.rehearse({})
    assert nothing.sqnr_db == np.inf
    assert 10 < found.sqnr_db < 60
    assert (found.samples, found.data) == (8, "random")
    assert found == study.rehearse(study.space.resolve(everything))
    fine = Site(tensor="b", consumers=(Consumer("Conv#2", 0),), format="int16")
    outside = study.rehearse(Placement(sites=frozenset({fine})))
    assert 60 < outside.sqnr_db < nothing.sqnr_db
    assert study.trials == ()
