"""Cases that differ only in the runtime are timed together: two simulated devices of known times."""

from __future__ import annotations

import dataclasses
from functools import partial

import other_fake
import pytest

from qdqspec._core.locks import DeviceLock
from qdqspec.app.preparation.runtimes import lock_of
from qdqspec.app.session import Session
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.errors import BackendError
from qdqspec.types import Case, TuneRules
from tests.support.stand_ins import true_ms

RULES = TuneRules(trials=3, min_sqnr_db="none")


@pytest.fixture
def other(monkeypatch):
    """Registers the second device; the returned function installs it with a factor on its times."""
    other_fake.install(monkeypatch, 1.0)
    return partial(other_fake.install, monkeypatch)


def case_on(models, backend: str, **fields) -> Case:
    matrix = {"backend": backend}
    return Case(
        id=backend, model=models / "digits_resnet.onnx", backend=backend, matrix=matrix, tune=RULES, **fields
    )


@pytest.fixture
def session(tmp_path):
    with Session(root=tmp_path, backend="fake", cache_dir=tmp_path / "cache") as opened:
        yield opened


def measure_both(session, models) -> None:
    for backend in ("fake", "other"):
        session.evidence(case_on(models, backend), frozenset({"latency", "parity"}))


def test_the_reference_is_the_fastest_float_runtime(models, session, other):
    other(scale=0.5)
    measure_both(session, models)
    (found,) = session.compare_runtimes()
    assert session.record().runtimes == (found,)
    assert found.name == "digits_resnet"
    assert found.reference == "other float"
    assert found.named("other float").ratio.median == 1
    model = models / "digits_resnet.onnx"
    truth = true_ms(model) / true_ms(model, {"fake.seed": str(other_fake.SEED), "fake.scale": "0.5"})
    assert found.named("fake float").ratio.median == pytest.approx(truth, rel=0.03)


def test_the_winner_is_the_fastest_model_within_its_limit(models, session, other):
    other(scale=4)
    measure_both(session, models)
    (found,) = session.compare_runtimes()
    assert found.winner == "fake tuned"
    assert found.named("fake tuned").ratio.high < 1
    for backend in ("fake", "other"):  # simulates a change of data or runtime after the search
        work = session.work(case_on(models, backend))
        assert work.parity.sqnr_db < 150
        strict = dataclasses.replace(RULES, min_sqnr_db=150.0)
        work.prepared.case = dataclasses.replace(work.prepared.case, tune=strict)
    (found,) = session.compare_runtimes()
    assert found.named("fake tuned").limit_db == 150
    assert found.winner == "fake float"


def test_cases_of_other_shapes_or_without_a_backend_in_the_matrix_are_not_compared(models, session, other):
    for backend, batch in (("fake", 1), ("other", 8)):
        case = dataclasses.replace(case_on(models, backend), matrix={"batch": batch, "backend": backend})
        session.evidence(case, frozenset({"latency"}))
    without = Case(id="default", model=models / "digits_resnet.onnx", tune=RULES)
    session.evidence(without, frozenset({"latency"}))
    assert session.compare_runtimes() == ()


def test_a_runtime_that_fails_in_a_comparison_is_listed_with_the_reason(models, session, other, monkeypatch):
    measure_both(session, models)

    def refuse(self, model, options):
        raise BackendError("out of order")

    monkeypatch.setattr(other_fake.OtherDevice, "build", refuse)
    (found,) = session.compare_runtimes()
    assert "out of order" in found.named("other float").failure
    assert found.reference == "fake float"
    assert found.named("other float").ratio is None


@pytest.mark.parametrize(("hardware", "locks"), [("", ["0-fake", "0-other"]), ("cpu", ["cpu"])])
def test_each_device_is_locked_once_while_timing(models, session, other, monkeypatch, hardware, locks):
    """Searches and comparisons use one lock for backends on one processor, although the keys of results differ."""
    own, enter, taken = FakeDevice.capabilities, DeviceLock.__enter__, []
    monkeypatch.setattr(
        FakeDevice, "capabilities", lambda *given: dataclasses.replace(own(*given), hardware=hardware)
    )
    monkeypatch.setattr(DeviceLock, "__enter__", lambda self: taken.append(self._key) or enter(self))
    measure_both(session, models)
    assert {*taken} == {*locks}
    taken.clear()
    session.compare_runtimes()
    assert taken == locks


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-web", "openvino"])
def test_runtimes_of_the_cpu_use_its_lock(tmp_path, name):
    with Session(root=tmp_path, backend=name) as session:
        assert lock_of(session.runtime()) == "cpu"
