"""Warm starts of a search: caches, schemes, quantized models and journals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from random_models import ranges_for

from qdqspec.app.preparation.start import warm_starts as starts_of
from qdqspec.backends.onnxruntime import backend
from qdqspec.errors import ConfigError, ModelError, StateError
from qdqspec.graph.fold import fold_batchnorm
from qdqspec.graph.model import load_model
from qdqspec.graph.regions.search import find_regions
from qdqspec.graph.storage import save_model
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.pattern_cache import cache_text, gather
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.scheme_file import write_scheme
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.search.journal import Journal
from qdqspec.types import Case, Placement, Trial, TuneRules
from tests.support.weights import floating

HERE = ("onnxruntime-cpu", "this-machine")


@pytest.fixture
def space(models: Path) -> SchemeSpace:
    model = fold_batchnorm(load_model(models / "digits_resnet.onnx")).model
    return SchemeSpace(model, backend().capabilities(), regions=find_regions(model))


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def start(space: SchemeSpace, notes: list[str]) -> SimpleNamespace:
    """The used part of a prepared case."""
    backend, device = SimpleNamespace(target=HERE[0]), SimpleNamespace(key=HERE[1])
    return SimpleNamespace(space=space, backend=backend, device=device, note_once=notes.append)


def warm_starts(paths: Sequence[Path], start: SimpleNamespace) -> tuple[Placement, ...]:
    start.case = Case(id="default", model=Path("net.onnx"), tune=TuneRules(start_from=tuple(paths)))
    return starts_of(start)


@pytest.fixture
def half(space: SchemeSpace) -> Placement:
    """A placement with some quantized units, which is no pure labelling."""
    return space.resolve({unit.id: unit.full for unit in space.units[:9]})


def numbers(space: SchemeSpace) -> Quantizer:
    return Quantizer(space.model, ranges_for(space.model), biases=space.bias_sources)


def cache_at(path: Path, space: SchemeSpace, placement: Placement, target: str = HERE[0]) -> Path:
    trial = Trial(number=0, phase="pure", placement=placement, ratio=0.5)
    path.write_text(cache_text(gather([trial], space, target, HERE[1])))
    return path


@pytest.mark.parametrize("weights", ["integer", "float"])
def test_a_quantized_model_is_a_warm_start_with_its_placement(
    start: SimpleNamespace, half: Placement, tmp_path: Path, weights: str
) -> None:
    """Another tool gives its pairs other names."""
    path, given = tmp_path / "tuned.onnx", floating(half.sites, weights)
    proto = insert_qdq(start.space.model, half, numbers(start.space), floating=given).proto
    for node in proto.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.name = f"another_tool/{node.name}"
    save_model(proto, path)
    (found,) = warm_starts([path], start)
    assert found == half
    assert found.labels == half.labels


def test_placements_of_files_are_ordered_and_distinct(
    start: SimpleNamespace, half: Placement, tmp_path: Path
) -> None:
    everything = start.space.resolve(start.space.everything())
    scheme = tmp_path / "scheme.json"
    write_scheme(scheme, half, numbers(start.space).placed(half), HERE[0])
    cache = cache_at(tmp_path / "patterns.yml", start.space, everything)
    same = cache_at(tmp_path / "same.yaml", start.space, half)
    assert warm_starts([scheme, cache, same, scheme], start) == (half, everything)


def test_another_model_is_noted(
    start: SimpleNamespace, notes: list[str], models: Path, tmp_path: Path
) -> None:
    model = load_model(models / "squeezenet10.onnx")
    other = SchemeSpace(model, backend().capabilities(), regions=find_regions(model))
    path = cache_at(tmp_path / "patterns.yaml", other, other.resolve(other.everything()))
    assert warm_starts([path, models / "digits_resnet.onnx"], start) == ()
    assert notes[0] == "patterns.yaml contains no placement for this model"
    assert "digits_resnet.onnx contains no placement for this model" in notes


def test_files_of_another_backend_are_an_error(
    start: SimpleNamespace, half: Placement, tmp_path: Path
) -> None:
    scheme = tmp_path / "scheme.json"
    write_scheme(scheme, half, numbers(start.space).placed(half), "tensorrt-10")
    cache = cache_at(tmp_path / "patterns.yaml", start.space, half, "tensorrt-10")
    trial = Trial(number=0, phase="pure", placement=half, ratio=1.0, incumbent=True)
    journal = journal_at(tmp_path / "trials.jsonl", [trial], backend="tensorrt-10")
    for path in (scheme, cache, journal):
        with pytest.raises(StateError, match=r"made on tensorrt-10, not on onnxruntime-cpu") as caught:
            warm_starts([path], start)
        assert caught.value.where == str(path)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("a.yaml", StateError),
        ("a.json", StateError),
        ("a.jsonl", StateError),
        ("a.onnx", ModelError),
        ("a.txt", ConfigError),
    ],
)
@pytest.mark.parametrize("data", [None, b"\x00\x01{["])
def test_missing_damaged_and_other_files_are_an_error_with_the_path(
    start: SimpleNamespace, tmp_path: Path, name: str, error: type[Exception], data: bytes | None
) -> None:
    path = tmp_path / name
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(error, match=name):
        warm_starts([path], start)


# ---- journals -----------------------------------------------------------------------------------


def journal_at(path: Path, trials: Sequence[Trial], backend: str = HERE[0], device: str = HERE[1]) -> Path:
    with Journal.open(path, {"backend": backend, "device": device}) as journal:
        for trial in trials:
            journal.append(trial)
    return path


@pytest.fixture
def searched(start: SimpleNamespace, half: Placement) -> list[Trial]:
    """A search with the winner ``half``, whose confirmation found full quantization faster."""
    space = start.space
    reference, everything = space.resolve({}), space.resolve(space.everything())
    return [
        Trial(number=0, phase="pure", placement=reference, ratio=1.0, incumbent=True),
        Trial(number=1, phase="pure", placement=everything, ratio=0.6, incumbent=True),
        Trial(number=2, phase="refine", placement=half, ratio=0.5, incumbent=True),
        Trial(number=3, phase="confirm", placement=reference, ratio=1.0),
        Trial(number=4, phase="confirm", placement=half, ratio=0.59),
        Trial(number=5, phase="confirm", placement=everything, ratio=0.58),
    ]


def test_a_journal_is_a_warm_start_with_the_fastest_confirmed_placement(
    start: SimpleNamespace, searched: list[Trial], half: Placement, tmp_path: Path
) -> None:
    everything = searched[1].placement
    path = journal_at(tmp_path / "trials.jsonl", searched)
    before = path.read_bytes()
    assert warm_starts([path], start) == (everything, half)
    assert path.read_bytes() == before
    unfinished = journal_at(tmp_path / "unfinished.jsonl", searched[:3])
    unfinished.write_bytes(unfinished.read_bytes() + b'{"trial": 3, "pha')  # an incomplete line
    assert warm_starts([unfinished], start) == (half, everything)
