"""The search for the smallest failing input is deterministic, bounded, silent and stays within the input domain."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from onnx_text import parsed

from qdqspec.accuracy.data import InputSpec
from qdqspec.accuracy.input_search import (
    Drawn,
    InputDomain,
    Span,
    drawn_inputs,
    input_domains,
    search_inputs,
    spans_of,
)
from qdqspec.accuracy.probes import InputResult
from qdqspec.errors import SpecError
from qdqspec.testing.records import params_of
from qdqspec.types import InputShape, ParitySearch, ShapeProfile
from qdqspec.types.requests import InputRequest

WITHIN = InputResult((), 0.0)
SAMPLES = ({"x": np.linspace(-1, 3, 12, dtype=np.float32).reshape(1, 3, 4), "ids": np.array([[1, 2]])},)


def domain(
    name: str, dtype: str, known: Span, tried: Span, *shapes: dict[str, tuple[int, int]]
) -> InputDomain:
    """A domain with these axes, from the least to the most, for each profile."""
    spans = []
    for shape in shapes:
        low, high = zip(*shape.values(), strict=True)
        spans.append(InputShape(min=low, opt=low, max=high))
    words = {"dtype": np.dtype(dtype), "shapes": tuple(spans), "axes": tuple(shapes[0])}
    return InputDomain(name=name, known=known, tried=tried, **words)


FLOATS = domain("x", "f4", Span(-1, 3), Span(-3, 5), {"batch": (1, 4), "c": (3, 3), "w": (4, 4)})
WHOLE = domain("ids", "i8", Span(3, 17), Span(3, 17), {"batch": (1, 4), "sequence": (2, 9)})


def values(drawn: Drawn) -> np.ndarray:
    return drawn["x"].values


def searched(
    attempt, examples: int = 200, seed: int = 0, *, domains=(FLOATS,), samples=SAMPLES, **bounds
) -> tuple[ParitySearch, Drawn | None]:
    bounds = {"seconds": math.inf, **bounds}
    strategy = drawn_inputs(domains, samples)
    return search_inputs(strategy, attempt, examples=examples, seed_number=seed, **bounds)


@given(drawn_inputs((FLOATS, WHOLE), SAMPLES))
def test_drawn_inputs_are_within_their_domains(drawn: Drawn) -> None:
    x, ids = drawn["x"].values, drawn["ids"].values
    assert (x.dtype, ids.dtype) == (np.float32, np.int64)
    assert np.isfinite(x).all()
    assert -3 <= x.min() <= x.max() <= 5
    assert 3 <= ids.min() <= ids.max() <= 17
    assert x.shape[0] == ids.shape[0], "axes of one name are equally long"
    assert x.shape[1:] == (3, 4)
    assert 1 <= x.shape[0] <= 4
    assert 2 <= ids.shape[1] <= 9
    assert drawn["x"].words.isprintable()


def test_bounds_and_the_smallest_numbers_are_tried() -> None:
    seen: set[float] = set()
    shapes: set[int] = set()

    def attempt(drawn: Drawn) -> InputResult:
        array = values(drawn)
        seen.update((float(array.min()), float(array.max())))
        shapes.add(array.shape[0])
        return WITHIN

    searched(attempt)
    assert {-3.0, -1.0, 0.0, 3.0, 5.0} <= seen
    assert any(0 < value < 1e-38 for value in seen), "the smallest numbers above zero"
    assert shapes == {1, 2, 3, 4}


def test_all_axes_of_an_input_are_drawn_from_one_shape_profile() -> None:
    shapes = ({"a": (1, 2), "b": (8, 8)}, {"a": (5, 6), "b": (3, 3)})
    several = domain("x", "f4", Span(0, 1), Span(0, 1), *shapes)
    seen = set()
    searched(lambda drawn: seen.add(values(drawn).shape) or WITHIN, domains=(several,), samples=())
    assert seen == {(1, 8), (2, 8), (5, 3), (6, 3)}


def test_inputs_of_their_own_kinds_have_their_own_noise() -> None:
    two = (FLOATS, dataclasses.replace(FLOATS, name="y"))
    seeds: set[tuple[str, str]] = set()

    def attempt(drawn: Drawn) -> InputResult:
        if all(each.words.startswith("uniform") for each in drawn.values()):
            seeds.add(tuple(each.words.rpartition("seed")[2] for each in drawn.values()))
        return WITHIN

    searched(attempt, domains=two, samples=())
    assert any(x != y for x, y in seeds), "the same noise in both hides what depends on their difference"


def test_the_seed_determines_the_search() -> None:
    tried: dict[int, list[bytes]] = {}
    for run, seed in enumerate((7, 7, 8)):
        seen = tried.setdefault(run, [])
        searched(lambda drawn, seen=seen: seen.append(values(drawn).tobytes()) or WITHIN, seed=seed)
    assert tried[0] == tried[1] != tried[2]


def test_the_time_limit_ends_the_search() -> None:
    clock = iter(range(10_000))
    search, smallest = searched(lambda drawn: WITHIN, seconds=20, clock=lambda: next(clock))
    assert (search.late, search.tried, smallest) == (True, 20 - 1, None)


def test_the_time_limit_ends_the_shrinking_and_keeps_its_result() -> None:
    finds: list[Drawn] = []

    def attempt(drawn: Drawn) -> InputResult:
        if values(drawn).max() <= 3.5:
            return WITHIN
        finds.append(drawn)
        return InputResult(("it breaks",), 1.0)

    search, smallest = searched(attempt, seconds=1, clock=lambda: float(len(finds) >= 2))
    assert search.late
    assert len(finds) == 2
    assert any(np.array_equal(values(smallest), values(each)) for each in finds)


@pytest.mark.parametrize("seed", range(4))
def test_a_search_in_several_shape_profiles_tries_all_its_inputs(seed: int) -> None:
    shapes = ({"batch": (1, 4), "w": (2, 9)}, {"batch": (2, 2), "w": (3, 3)})
    several = tuple(domain(name, "f4", Span(0, 1), Span(-1, 2), *shapes) for name in ("x", "y"))
    samples = ({"x": np.ones((1, 3)), "y": np.zeros((1, 3))},)
    search, _ = searched(lambda _: WITHIN, 60, seed, domains=several, samples=samples)
    assert search.tried > 50


def test_attempts_without_a_result_are_not_counted() -> None:
    search, _ = searched(lambda drawn: None if values(drawn).any() else WITHIN, examples=20)
    assert 1 <= search.tried < 10
    search, _ = searched(lambda drawn: None, examples=20)
    assert search.tried == 0


def test_the_search_prints_nothing_and_writes_no_file(tmp_path: Path) -> None:
    code = """
import numpy as np, local_module
from qdqspec.accuracy.input_search import InputDomain, Span, drawn_inputs, search_inputs
from qdqspec.accuracy.probes import InputResult
from qdqspec.types import InputShape
shapes, spans = (InputShape(min=(1,), opt=(1,), max=(4,)),), {'known': Span(0, 1), 'tried': Span(-1, 2)}
x = InputDomain(name='x', dtype=np.dtype(np.float32), shapes=shapes, axes=('n',), **spans)
_, smallest = search_inputs(drawn_inputs((x,), ()),
             lambda drawn: InputResult(('broken',) if 2 in drawn['x'].values else (), 0.0),
             examples=100, seconds=60, seed_number=3)
assert smallest is not None
"""
    (tmp_path / "local_module.py").write_text("VALUES = (123456, 0.8125, 'a constant that could be drawn')\n")
    (tmp_path / "run.py").write_text(code)
    before = {path.name for path in tmp_path.iterdir()}
    command = [sys.executable, "-B", "-W", "error", "run.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path.name for path in tmp_path.iterdir()} == before


TEXT = """net (int64[batch,sequence] ids, float[batch,sequence] mask, float16[2,?] x)
  => (int64[batch,sequence] y) { y = Identity(ids) }"""
SPECS = {
    "ids": InputSpec(dtype=np.dtype(np.int64), shape=(1, 8)),
    "mask": InputSpec(dtype=np.dtype(np.float32), shape=(1, 8)),
    "x": InputSpec(dtype=np.dtype(np.float16), shape=(2, 5)),
}
DATA = ({"ids": np.array([2, 900]), "mask": np.array([0, 1]), "x": np.array([-60000, 60000])},)


def domains(*profiles: ShapeProfile, **more) -> dict[str, InputDomain]:
    request = InputRequest(key="", limits=params_of("parity", min_sqnr_db=20), **more)
    found = input_domains(parsed(TEXT), SPECS, profiles or [ShapeProfile()], DATA, request)
    return {one.name: one for one in found}


@pytest.mark.parametrize(
    ("words", "tried"),
    [
        # no float16 is larger than the last
        ({}, {"ids": Span(2, 900), "mask": Span(-0.5, 1.5), "x": Span(-65504, 65504)}),
        ({"beyond": 1}, {"mask": Span(0, 1)}),
        ({"values": {"ids": (0, 30000)}}, {"mask": Span(-0.5, 1.5), "ids": Span(0, 30000)}),
    ],
)
def test_tried_values_exceed_the_data_for_floats_only_or_are_those_of_the_spec(
    words: dict, tried: dict
) -> None:
    found = domains(**words)
    assert {name: found[name].tried for name in tried} == tried


def test_a_range_of_an_unknown_input_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"`search.values` names 'maks'.*did you mean 'mask'"):
        domains(values={"maks": (0, 1)})


def test_shapes_are_within_the_declared_ranges_and_dimensions_have_the_names_of_the_model() -> None:
    ranges = InputShape(min=(1, 4), opt=(2, 8), max=(8, 64))
    found = domains(ShapeProfile(shapes={"ids": ranges, "mask": ranges}))
    assert found["ids"].shapes == found["mask"].shapes == (ranges,)
    assert found["ids"].axes == found["mask"].axes == ("batch", "sequence")
    assert found["x"].shapes == (InputShape.of((2, 5)),)  # as in the model


def test_spans_are_those_of_finite_values() -> None:
    assert spans_of([{"x": np.array([-np.inf, -2, 1])}, {"x": np.array([3, np.inf])}]) == {"x": Span(-2, 3)}
    for values in (np.zeros((0, 3)), np.full((2, 2), -np.inf)):
        assert spans_of([{"x": values}]) == {"x": Span(0, 0)}


def test_a_sample_keeps_its_infinite_values() -> None:
    mask = np.array([[0, -np.inf], [0, 0]], np.float32)
    own = domain("x", "f4", Span(0, 0), Span(0, 0), {"a": (2, 2), "b": (2, 2)})
    made: dict[str, np.ndarray] = {}

    def attempt(drawn: Drawn) -> InputResult:
        made[drawn["x"].words] = values(drawn)
        return WITHIN

    searched(attempt, examples=100, domains=(own,), samples=({"x": mask},))
    np.testing.assert_array_equal(made["sample 0"], mask)
