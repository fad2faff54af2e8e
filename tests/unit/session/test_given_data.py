"""Arrays, feeds, models and data loaders in Python are converted to files that the session reads."""

from __future__ import annotations

import importlib.metadata
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

import qdqspec
from qdqspec import Session
from qdqspec.accuracy.data import InputSpec, open_data
from qdqspec.accuracy.metrics import Scores
from qdqspec.app.given_data import GivenFiles
from qdqspec.errors import ConfigError, DataError
from qdqspec.spec.inline import inline_case
from qdqspec.types import InputShape

X = {"x": InputSpec(dtype=np.dtype(np.float32), shape=(1, 2, 3), own=(1, 2, 3))}
ROWS = np.arange(24, dtype=np.float32).reshape(4, 2, 3)


class Tensor:
    """One with a gradient, or in the memory of a GPU."""

    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("use tensor.detach()")


def values(path):
    return np.concatenate([feed["x"] for feed in open_data(path, X)])


@pytest.mark.parametrize("form", ["arrays", "samples", "whole inputs", "lists", "batches"])
def test_arrays_and_feeds_give_the_same_samples(form):
    given = {
        "arrays": {"x": ROWS, "labels": np.arange(4)},
        "samples": ({"x": row, "labels": number} for number, row in enumerate(ROWS)),
        "whole inputs": ({"x": row[None], "labels": [number]} for number, row in enumerate(ROWS)),
        "lists": [{"x": row.tolist(), "labels": number} for number, row in enumerate(ROWS)],
        "batches": ({"x": ROWS[i : i + 3], "labels": np.arange(4)[i : i + 3]} for i in (0, 3)),
    }[form]
    files = GivenFiles()
    data = open_data(files.data(given, "calibration"), X)
    np.testing.assert_array_equal(np.concatenate([feed["x"] for feed in data]), ROWS)
    np.testing.assert_array_equal(data.require_labels(), np.arange(4))


@pytest.mark.parametrize("form", ["lists", "objects", "feeds"])
def test_samples_of_several_lengths_are_one_feed_each(form):
    samples = [np.full((2, length), length, np.float32) for length in (3, 0, 5)]
    objects = np.empty(3, dtype=object)
    objects[:] = samples
    given = {
        "lists": {"x": samples, "labels": [1, 2, 3]},
        "objects": {"x": objects, "labels": np.arange(1, 4)},
        "feeds": ({"x": sample, "labels": number} for number, sample in enumerate(samples, 1)),
    }[form]
    span = InputShape(min=(1, 2, 0), opt=(1, 2, 3), max=(1, 2, 5))
    spec = {"x": InputSpec(dtype=np.dtype(np.float32), shape=(1, 2, 3), ranges=(span,))}
    files = GivenFiles()
    data = open_data(files.data(given, "calibration"), spec)
    assert [feed["x"].shape for feed in data] == [(1, 2, 3), (1, 2, 0), (1, 2, 5)]
    np.testing.assert_array_equal(data.require_labels(), [1, 2, 3])
    tokens = ({"x": sample, "labels": [4] * count} for sample, count in zip(samples, (3, 0, 1), strict=True))
    labels = open_data(files.data(tokens, "evaluation"), spec).require_labels()
    assert [label.tolist() for label in labels] == [[4] * 3, [], [4]]


@pytest.mark.parametrize("places", [(), (2,)])  # of one class, or of each place of a sample
def test_whole_batches_have_a_label_for_each_row(places):
    """The last one may be smaller."""
    labels = np.arange(4 * sum(places or (1,))).reshape(4, *places)
    given = ({"x": ROWS[i : i + 3], "labels": labels[i : i + 3]} for i in (0, 3))
    span = InputShape(min=(1, 2, 3), opt=(3, 2, 3), max=(3, 2, 3))
    spec = {"x": InputSpec(dtype=np.dtype(np.float32), shape=(3, 2, 3), ranges=(span,))}
    files = GivenFiles()
    data = open_data(files.data(given, "evaluation"), spec)
    assert [len(feed["x"]) for feed in data] == [3, 1]
    np.testing.assert_array_equal(data.labels_of(2), labels)
    np.testing.assert_array_equal(data.labels_of(1), labels[:3])
    assert Scores(Mock(), Mock(evaluation=data), Mock(), Mock()).samples == 4


def test_samples_of_a_dynamic_first_dimension_are_not_divided():
    """It may count the steps of a sequence."""
    spec = {"x": InputSpec(dtype=np.dtype(np.float32), shape=(1, 2, 3), own=(None, 2, 3))}
    files = GivenFiles()
    with pytest.raises(DataError, match=r"a sample of shape \[4, 2, 3\], where the case has \[1, 2, 3\]"):
        open_data(files.data([{"x": ROWS}], "calibration"), spec)


def test_data_that_is_none_is_not_given():
    files = GivenFiles()
    assert files.asked({"calibration": None, "evaluation": "data.npz", "seed": None}) == {
        "evaluation": "data.npz",
        "seed": None,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "it yields no feed"),
        ([1], "feed 0 is no mapping but int"),
        ([(ROWS, 1)], "feed 0 is no mapping but tuple"),
        ([{"x": Tensor()}], r"'x' is no array of numbers \(use tensor.detach\(\)\)"),
        (ROWS, "this is no data but ndarray"),
        (7, "this is no data but int"),
        ({"x": ["a"]}, "'x' is no array of numbers"),
        ({"x": [ROWS, ROWS[:2]], "labels": [1]}, "lists have unequal numbers of samples: 'x' 2, 'labels' 1"),
        ([{"x": [[1], [2, 3]]}], "'x' is no array of numbers"),
        ([{"x": object()}], "'x' is no array of numbers"),
    ],
)
def test_objects_that_are_no_data_are_an_error(given, message):
    with pytest.raises(DataError, match=message) as caught:
        GivenFiles().data(given, "calibration")
    assert ("'labels': y}" if "tuple" in message else "{input: array}") in str(caught.value.cure)


def test_a_session_accepts_a_model_and_data_in_memory(models):
    proto = onnx.load(models / "digits_resnet.onnx")
    rows = np.random.default_rng(0).normal(size=(3, 1, 16, 16)).astype(np.float32)
    with Session(backend="fake") as session:
        case = session.case(proto, {"calibration": {"input": rows}})
        assert case.model.is_file()
        assert (
            case.model == session.case(proto, {}).model
        )  # one file, and one folder of results, for equal models
        proto.graph.doc_string = "another"
        assert case.spec_name != session.case(proto, {}).spec_name
        data = open_data(
            case.inputs.calibration, {"input": InputSpec(dtype=np.dtype("f4"), shape=(1, 1, 16, 16))}
        )
        assert data.samples == 3


def culprits(model, _, calibration, output, backend):
    with Session(output=output, backend=backend) as session:
        session.find_culprits(model, calibration=calibration)


def regions(model, _, calibration, output, backend):
    with Session(output=output, backend=backend) as session:
        session.regions(session.case(model, {"calibration": calibration}))


def opened(model, _, calibration, output, backend):
    with Session(output=output, backend=backend) as session:
        case = session.case(model, {"calibration": calibration})
        assert session.work(case).prepared.data.calibration.samples


@pytest.mark.parametrize("do", [qdqspec.verify, qdqspec.measure, culprits, regions, opened])
def test_the_error_of_arrays_in_memory_names_the_argument(models, tmp_path, do):
    model, wrong = models / "digits_resnet.onnx", {"image": np.zeros((2, 1, 16, 16), np.float32)}
    with pytest.raises(DataError) as caught:
        do(model, model, calibration=wrong, output=tmp_path, backend="fake")
    assert caught.value.where == "data 'calibration'"


def case_of(tmp_path, loader):
    (tmp_path / "m.onnx").touch()
    return inline_case(tmp_path / "m.onnx", {"calibration": {"loader": loader}})


@pytest.fixture
def entry_point(monkeypatch):
    """Installs a data loader ``theirs``, whose entry point has this value."""

    def install(value):
        points = [importlib.metadata.EntryPoint("theirs", value, "qdqspec.data")]
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: points * (group == "qdqspec.data")
        )

    return install


def load_installed():
    return {"x": ROWS}


def test_a_loader_is_called_once_and_that_of_an_entry_point_is_found(tmp_path, entry_point):
    entry_point(f"{__name__}:load_installed")
    calls = iter([[{"x": row} for row in ROWS]])
    for name, loaders in (("mine", {"mine": lambda: next(calls)}), ("theirs", {})):
        files = GivenFiles()
        case = files.loaded(case_of(tmp_path, name), loaders)
        for _ in range(2):
            np.testing.assert_array_equal(values(case.inputs.calibration), ROWS)


def raises():
    raise KeyError("no such table")


def raises_later():
    yield {"x": ROWS[0]}
    raise KeyError("no such table")


@pytest.mark.parametrize("load", [raises, raises_later])
def test_an_error_of_a_loader_is_reported_with_its_line(tmp_path, load):
    with pytest.raises(DataError, match="data loader 'mine' raised KeyError: 'no such table'") as caught:
        GivenFiles().loaded(case_of(tmp_path, "mine"), {"mine": load})
    assert str(caught.value.where).startswith(f"{__file__}:")


@pytest.mark.parametrize(
    ("load", "where", "cure"),
    [
        (lambda: {"input": np.full((3, 1, 16, 16), np.nan)}, "data 'mine'", "take the sample out"),
        (lambda: ({"input": np.full((1, 16, 16), n)} for n in (0.0, np.nan)), "data 'mine', feed 1", ""),
        (lambda: [{"image": np.zeros(9)}], "data 'mine', feed 0", "{loader: mine, names: {input: image}}"),
    ],
)
def test_the_error_of_invalid_data_names_its_loader(models, tmp_path, load, where, cure):
    with Session(backend="fake", root=tmp_path, loaders={"mine": load}) as session:
        case = inline_case(models / "digits_resnet.onnx", {"calibration": {"loader": "mine"}, "trials": 1})
        with pytest.raises(DataError) as caught:
            session.search(case)
    assert caught.value.where == where
    assert cure in str(caught.value)


def test_the_error_of_a_loader_that_cannot_be_imported_names_its_entry_point(tmp_path, entry_point):
    entry_point("no_such_module:load")
    with pytest.raises(ConfigError, match="'theirs' cannot be imported from 'no_such_module:load'"):
        GivenFiles().loaded(case_of(tmp_path, "theirs"), {})
    case = GivenFiles().loaded(case_of(tmp_path, "their"), {})
    unknown = r"no data loader is called 'their' \(did you mean 'theirs'\?\)"
    with pytest.raises(DataError, match=unknown) as caught:
        open_data(case.inputs.calibration, X)
    assert "fixture qdq_data" in str(caught.value.cure)


def test_labels_of_calibration_data_are_not_read(models, tmp_path):
    """A glob may match files with and without labels."""
    images = np.zeros((3, 1, 16, 16), np.float32)
    np.savez(tmp_path / "a.npz", input=images)
    np.savez(tmp_path / "b.npz", input=images, labels=np.arange(3))
    source = str(tmp_path / "*.npz")
    with Session(root=tmp_path) as session:
        case = inline_case(models / "digits_resnet.onnx", {"calibration": source, "evaluation": source})
        prepared = session.work(case).prepared
        assert prepared.data.calibration.samples == 6
        with pytest.raises(DataError, match="3 labels for 6 samples"):
            _ = prepared.data.evaluation
