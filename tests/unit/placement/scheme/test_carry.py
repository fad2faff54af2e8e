"""Placements are matched in other models, and kept in a pattern cache for later searches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest
from changed_models import renamed
from hypothesis import given, strategies as st
from onnx import helper
from onnx_text import parsed

from qdqspec.backends.onnxruntime import backend
from qdqspec.errors import PlacementError, StateError
from qdqspec.graph.fold import fold_batchnorm
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.regions.search import find_regions
from qdqspec.qdq.match import Matcher, positions
from qdqspec.qdq.region_schemes import (
    MOST_BYTES,
    CacheEntry,
    Frames,
    Key,
    PatternCache,
    parse_scheme,
    placement_of,
    pruned,
    schemes_of,
)
from qdqspec.qdq.search_space import SchemeSpace, labels_of
from qdqspec.types import Consumer, Interval, Placement, Region, RegionRules, Site, Trial

TWINS = """g (float[1,4,6,6] x) => (float[1,4,6,6] y) {
    a = Conv(x, w)  b = Relu(a)  c = Conv(b, w)  d = Relu(c)  y = Softmax(d) }"""


def model_of(text: str) -> Model:
    return parsed(text, named=True, w=(4, 4, 1, 1))


def cut(model: Model, *groups: Sequence[str]) -> tuple[Region, ...]:
    return find_regions(model, RegionRules(by="manual", manual=tuple(map(tuple, groups))))


def leaf_with(regions: Sequence[Region], node: str) -> Region:
    return next(region for region in regions if not region.children and node in region.nodes)


def test_a_tensor_between_two_regions_is_in_the_schemes_of_both() -> None:
    model = model_of(TWINS)
    frames = Frames(model, cut(model, ["a", "b"], ["c", "d"]))
    placement = Placement(sites=frozenset({Site(tensor="b", consumers=(Consumer("c", 0),), format="uint8")}))
    found = {key: scheme for key, scheme in schemes_of(frames, placement).items() if scheme.sites}
    assert sorted(map(str, found.values())) == ["in0.0=uint8", "out1.0=uint8"]
    assert all(placement_of(frames, {key: scheme}) == placement for key, scheme in found.items())


@pytest.mark.parametrize("text", ["in9.0=uint8", "in0.7=uint8", "out0.3=uint8"])
def test_a_scheme_of_another_pattern_is_an_error(text: str) -> None:
    model = model_of(TWINS)
    regions = cut(model, ["a", "b"], ["c", "d"])
    with pytest.raises(PlacementError, match="is not in region"):
        placement_of(Frames(model, regions), {leaf_with(regions, "a").id: parse_scheme(text)})


def test_a_scheme_fits_a_region_whose_commutative_operands_are_exchanged() -> None:
    model = model_of(
        """g (float[1,4,6,6] x) => (float[1,4,6,6] y, float[1,4,6,6] z) {
            a = Conv(x, w)  b = Relu(a)  p = Add(a, b)  y = Sigmoid(p)
            c = Conv(x, w)  d = Relu(c)  q = Add(d, c)  z = Sigmoid(q) }"""
    )
    regions = cut(model, ["a", "b", "p", "y"], ["c", "d", "q", "z"])
    frames, first, second = Frames(model, regions), leaf_with(regions, "a"), leaf_with(regions, "c")
    given = Placement(sites=frozenset({Site(tensor="b", consumers=(Consumer("p", 1),), format="uint8")}))
    scheme = schemes_of(frames, given)[first.id]
    (found,) = placement_of(frames, {second.id: scheme}).sites
    assert (found.tensor, found.consumers) == ("d", (Consumer("q", 0),))


def test_a_half_quantized_operator_is_projected_to_float(models: Path) -> None:
    model = load_model(models / "squeezenet10.onnx")
    space = SchemeSpace(model, backend().capabilities(), regions=find_regions(model))
    everything = space.resolve(space.everything())
    conv = next(unit for unit in space.units if unit.op_type == "Conv")
    without = frozenset(s for s in everything.sites if not (s.weight and s.consumers[0].node == conv.id))
    labels = labels_of(space, Placement(sites=without))
    assert conv.id not in labels
    assert len(labels) == len(space.units) - 1


def sites_of(model: Model) -> list[Site]:
    """One site for each activation that a node reads, and for each weight."""
    return [
        Site(
            tensor=tensor,
            consumers=(Consumer(node.name, index),),
            format="int8" if tensor in model.constants else "uint8",
            weight=tensor in model.constants,
        )
        for node in model.nodes
        for index, tensor in enumerate(node.inputs[:2])
    ]


@pytest.mark.parametrize("name", ["digits_resnet", "ultraface_rfb320", "squeezenet10"])
def test_every_site_of_a_renamed_model_is_found_by_position(name: str, models: Path) -> None:
    model = load_model(models / f"{name}.onnx")
    other = Model(renamed(model.proto))
    matcher = Matcher(other, positions(model))
    for site in (s for s in sites_of(model) if model.elem_type(s.tensor) == onnx.TensorProto.FLOAT):
        (found,) = matcher.find(site)[0]
        old, new = model.by_name[site.consumers[0].node], other.by_name[found.consumers[0].node]
        assert (old.index, site.consumers[0].input) == (new.index, found.consumers[0].input)


def test_an_additional_activation_function_changes_no_other_position(models: Path) -> None:
    """Operators that tools insert and remove do not count in positions."""
    model = load_model(models / "digits_resnet.onnx")
    before = positions(model)
    first = model.proto.graph.node[0]
    tensor, first.output[0] = first.output[0], "before"
    model.proto.graph.node.insert(1, helper.make_node("Relu", ["before"], [tensor], "more"))
    after = positions(Model(model.proto))
    assert {n: p for n, p in before.items() if p != after[n] and not p.startswith("Relu")} == {}


def test_a_node_of_the_same_name_and_another_operator_does_not_match(models: Path) -> None:
    model = load_model(models / "digits_resnet.onnx")
    site = next(site for site in sites_of(model) if site.weight)
    (end,) = site.consumers
    proto = renamed(model.proto)
    proto.graph.node[-1].name = end.node
    (found,) = Matcher(Model(proto), positions(model)).find(site)[0]
    assert found.consumers == (Consumer(f"n{model.by_name[end.node].index}", end.input),)


DIGITS = Path(__file__).parents[4] / "specs" / "models" / "digits_resnet.onnx"
HERE = ("onnxruntime-cpu", "this-machine")


def entry(sites: str, ratio: float, interval: tuple[float, float] | None = None) -> CacheEntry:
    return CacheEntry(scheme=parse_scheme(sites), ratio=ratio, interval=interval)


WORDS = [f"in{node}.{slot}=uint8" for node in range(4) for slot in range(2)]
ENTRIES = st.builds(
    entry,
    st.lists(st.sampled_from(WORDS), unique=True).map(" ".join),
    st.floats(0.1, 3.0) | st.just(1),  # the ratio of a reference is the integer 1
    st.none() | st.just((0.2, 0.4)),
)
CACHES = st.dictionaries(
    st.builds(Key, st.sampled_from("ab"), st.sampled_from("xy"), st.sampled_from(("p1-1", "p1-2"))),
    st.lists(ENTRIES, min_size=1, max_size=6).map(pruned),
).map(lambda entries: PatternCache(entries=entries, texts={key.pattern: "Conv" for key in entries}))


@given(st.lists(ENTRIES, max_size=60))
def test_pruning_keeps_the_best_entry_of_each_scheme(entries: list[CacheEntry]) -> None:
    kept = pruned(entries)
    assert [e.rank for e in kept] == sorted(e.rank for e in kept)
    best = sorted(
        min(e.rank for e in entries if e.scheme == scheme) for scheme in {e.scheme for e in entries}
    )
    assert [e.rank for e in kept] == best[:32]


def test_a_confirmed_ratio_ranks_before_a_lower_unconfirmed_one() -> None:
    confirmed = entry("in0.0=uint8 in0.1=uint8", 0.50, (0.495, 0.505))
    unconfirmed = entry("in3.0=uint8 in3.1=uint8", 0.497)
    assert pruned([unconfirmed, confirmed])[0] == confirmed


@given(CACHES)
def test_a_cache_is_read_from_its_file_unchanged(
    tmp_path_factory: pytest.TempPathFactory, cache: PatternCache
) -> None:
    path = tmp_path_factory.mktemp("cache") / "patterns.yaml"
    path.write_text(cache.text())
    assert PatternCache.read(path) == cache
    assert PatternCache.read(path).text() == path.read_text()


def test_the_text_of_a_cache_file(golden) -> None:
    rows = (entry("in0.0=uint8 in0.1=w:int8/0 out1.0=uint8", 0.67, (0.66, 0.68)), entry("", 1.0))
    cache = PatternCache(entries={Key(*HERE, "p1-07ec1c620b5a4971"): rows},
                         texts={"p1-07ec1c620b5a4971": "Conv > Relu"})  # fmt: skip
    golden("placement/patterns.yaml", cache.text())


SOME = b"""schema_version: 1
caches:
- backend: onnxruntime-cpu
  device: this
  patterns:
  - pattern: p1-1
    text: Conv
    schemes:
    - {ratio: 0.5, interval: [0.4, 0.6], sites: in0.0=uint8 out1.0=uint8}
"""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "No such file"),
        (b"", "the whole file"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a: [", "not YAML"),
        (b"[" * 1_000_000, "recursion"),
        (b"a: &a [1]\nb: [*a, *a]", "no aliases"),
        (SOME.replace(b": 1\nc", b": 2\nc"), "schema_version"),
        (SOME.replace(b"0.5", b".nan"), "ratio"),
        (SOME.replace(b"[0.4, 0.6]", b"[0.4]"), "interval"),
        (SOME.replace(b"in0.0", b"at0.0"), "'at0.0=uint8' is not a site"),
        (SOME.replace(b"text", b"test"), "test"),
        (b"x" * (MOST_BYTES + 1), "at most"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_cache_is_an_error_with_its_name(
    tmp_path: Path, data: bytes | None, message: str
) -> None:
    path = tmp_path / "patterns.yaml"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(StateError) as caught:
        PatternCache.read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


# ---- from one search to the next ----------------------------------------------------------------
@pytest.fixture(scope="module")
def space() -> SchemeSpace:
    model = fold_batchnorm(load_model(DIGITS)).model
    return SchemeSpace(model, backend().capabilities(), regions=find_regions(model))


def trial(number: int, placement: Placement, ratio: float, **more: object) -> Trial:
    return Trial(number=number, phase="pure", placement=placement, ratio=ratio, **more)


def everything(space: SchemeSpace) -> Placement:
    return space.resolve(space.everything())


@pytest.fixture(scope="module")
def searched(space: SchemeSpace) -> list[Trial]:
    return [
        trial(0, space.resolve({}), 1.0),
        trial(1, everything(space), 0.6),
        trial(2, space.resolve(space.uniform("in-only")), 0.8),
        trial(3, space.resolve({space.units[0].id: space.units[0].full}), 0.1, status="failed"),
    ]


def test_the_first_warm_start_is_the_winner_of_the_last_search_on_the_same_backend(
    space: SchemeSpace, searched: list[Trial]
) -> None:
    first = PatternCache.gather(searched, space, *HERE).warm_starts(space, *HERE)[0]
    assert (first.digest, first.labels) == (everything(space).digest, everything(space).labels)


def test_confirmed_ratios_replace_those_of_screening(space: SchemeSpace, searched: list[Trial]) -> None:
    confirmed = {everything(space).digest: Interval(median=1.2, low=1.19, high=1.21)}
    cache = PatternCache.gather(searched, space, *HERE, confirmed=confirmed)
    seen = {row.interval: row.ratio for rows in cache.entries.values() for row in rows}
    assert seen[1.19, 1.21] == 1.2
    assert {rows[0].interval for rows in cache.entries.values()} == {None}


def test_patterns_of_a_model_of_other_shapes_match_by_structure(
    space: SchemeSpace, searched: list[Trial]
) -> None:
    cache = PatternCache.gather(searched, space, *HERE)
    proto = load_model(DIGITS).proto
    for info in (*proto.graph.input, *proto.graph.output):
        info.type.tensor_type.shape.dim[0].dim_value = 3
    del proto.graph.value_info[:]
    other = fold_batchnorm(Model(proto)).model
    regions = find_regions(other)
    assert {r.pattern for r in regions}.isdisjoint({r.pattern for r in space.regions})
    sister = SchemeSpace(other, backend().capabilities(), regions=regions)
    assert cache.warm_starts(sister, *HERE)[0].digest == everything(space).digest


def test_entries_of_this_device_take_precedence(space: SchemeSpace) -> None:
    own = PatternCache.gather([trial(0, space.resolve({}), 1.0)], space, *HERE)
    other = PatternCache.gather([trial(1, everything(space), 0.2)], space, HERE[0], "another-machine")
    assert other.warm_starts(space, *HERE) == (everything(space),)
    here = PatternCache(entries={**own.entries, **other.entries}).warm_starts(space, *HERE)
    assert here == (space.resolve({}),)  # on this device the float model was fastest


def test_regions_of_unknown_patterns_are_float_or_fully_quantized(
    space: SchemeSpace, searched: list[Trial]
) -> None:
    cache = PatternCache.gather(searched, space, *HERE)
    leaves = [r.pattern for r in space.regions if not r.children and "Conv" in r.pattern_text]
    known = next(key for key in cache.entries if key.pattern == max(leaves, key=leaves.count))
    starts = PatternCache(entries={known: cache.entries[known]}).warm_starts(space, *HERE)
    whole, alone = starts[:2]
    assert alone.sites < whole.sites
    assert len(dict(whole.labels)) > len(dict(alone.labels)) > 0
