"""Builds a case from keyword arguments or the command line, with the validation of a spec file.

``tune("model.onnx", trials=30, deny=["Softmax"])`` has the options of a spec's sections; a case built so has
no checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypedDict

from pydantic import Field, ValidationError

from qdqspec._core.registry import did_you_mean
from qdqspec.errors import ConfigError
from qdqspec.spec.fields import SpecPath, SpecSection
from qdqspec.spec.inputs import InputsSection
from qdqspec.spec.problems import Loc, error_without_file
from qdqspec.spec.sections import PatternsSection, QuantizeSection, RegionsSection, TuneSection, rules_of
from qdqspec.types import (
    Case,
    ClockChoice,
    DataSource,
    Granularity,
    Method,
    Metric,
    Objective,
    Preset,
    RealType,
    StartScales,
)

if TYPE_CHECKING:
    from onnx import ModelProto

PathLike: TypeAlias = str | os.PathLike[str]
GivenModel: TypeAlias = "PathLike | ModelProto"
# A path, a table as in a spec, arrays by input name with samples along the first axis, or feeds, one a sample.
GivenData: TypeAlias = PathLike | Mapping[str, Any] | Iterable[Mapping[str, Any]]
GivenShape: TypeAlias = Sequence[int] | Mapping[str, Sequence[int]]


class Asked(TypedDict, total=False):
    """Options of a case. Paths are relative to the working directory.

    ``regions`` is ``structure``, ``names``, ``fusion``, or groups of node names (wildcards as in a spec), one
    per region; ``graph`` is layer information that defines the groups of ``fusion``. ``name`` is the case's
    id, and its folder below ``reports/<model>/``. ``values`` are numbers, lists or arrays. ``metric``,
    ``min``, ``max_drop`` are keys of ``accuracy``. ``metrics`` are task metrics of the caller by the name
    that ``metric`` or a spec gives them; they are not part of a spec, so that a spec contains no code.
    """

    name: str
    quant: str
    calibrate: Method
    weights: Granularity
    activations: str
    outputs: bool | Literal["auto"]
    corrections: Literal["auto", "none"] | Sequence[str]
    dq_dtype: RealType
    calibration: GivenData
    scales: PathLike
    evaluation: GivenData
    shapes: Mapping[str, GivenShape]
    values: Mapping[str, Any]
    batch: int
    allow: Sequence[str]
    deny: Sequence[str]
    include: Sequence[str]
    include_file: PathLike
    exclude: Sequence[str]
    regions: Literal["structure", "names", "fusion"] | Sequence[Sequence[str]]
    graph: PathLike
    max_nodes: int
    preset: Preset
    trials: int
    trials_per_region: int
    region_models: bool
    validate_groups: bool
    minutes: float
    objective: Objective
    min_sqnr_db: float | Literal["none"]
    accuracy: Mapping[str, str | float]
    metric: str
    min: float | str
    max_drop: float | str
    min_gain: float | str
    clock: ClockChoice
    float16: bool
    start_from: Sequence[PathLike]
    start_scales: StartScales
    metrics: Mapping[str, Metric]


class AskedWithStrategy(Asked, total=False):
    """Options of a case, with a search strategy by name."""

    strategy: str


class BareSpec(SpecSection):
    """A spec without checks, for one case."""

    model: SpecPath
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")] = "default"
    batch: int | None = Field(default=None, ge=1)
    inputs: InputsSection = InputsSection()
    patterns: PatternsSection = PatternsSection()
    regions: RegionsSection = RegionsSection()
    quantize: QuantizeSection = QuantizeSection()
    tune: TuneSection = TuneSection()


_ACCURACY = ("metric", "min", "max_drop")  # options inside ``accuracy``
_SECTIONS: dict[
    str, type[SpecSection]
] = {  # in this order: ``calibration`` and ``scales`` are those of inputs
    "quantize": QuantizeSection,
    "patterns": PatternsSection,
    "regions": RegionsSection,
    "tune": TuneSection,
    "inputs": InputsSection,
}
# The location of each option in a spec: of most, the key of the same name in a section.
_PLACES: dict[str, tuple[str, ...]] = {
    **{key: (section, key) for section, keys in _SECTIONS.items() for key in keys.model_fields},
    **{word: ("patterns", "nodes", word) for word in ("include", "exclude")},
    **{word: ("tune", "accuracy", word) for word in _ACCURACY},
    "name": ("name",),
    "batch": ("batch",),
    "quant": ("quantize", "format"),
    "calibrate": ("quantize", "calibration"),
    "include_file": ("patterns", "allow_file"),
    "start_scales": ("quantize", "scales"),
    "regions": ("regions", "by"),
}
_PLACES = {word: place for word, place in _PLACES.items() if word in AskedWithStrategy.__annotations__}


def inline_case(model: PathLike, asked: Mapping[str, Any]) -> Case:
    """The case of a model and options. Raises `ConfigError` for an unknown option, `SpecError` with other problems."""
    return _make_case({"model": os.fspath(model)}, asked, str)


def with_words(case: Case, asked: Mapping[str, Any], *, written: Callable[[str], str] = str) -> Case:
    """A case with the given options in place of its spec's; values and limits of the metric are added to its own.

    ``written`` formats an option for messages, in the caller's syntax. Raises as `inline_case`.
    """
    own: dict[str, Any] = {"model": str(case.model)}
    if case.inputs.evaluation is not None:
        _put(own, ("inputs", "evaluation"), case.model)  # only whether there is some is validated
    if case.tune.accuracy is not None:
        limits = {name: value for name, value in asdict(case.tune.accuracy).items() if value is not None}
        _put(own, ("tune", "accuracy"), limits)
    found = _make_case(own, asked, written)
    fields: dict[str, dict[str, Any]] = {}
    for word in asked:
        place = _PLACES[word]
        section, field = place[0], place[1] if place[0] == "tune" else place[-1]
        field = {"shapes": "profiles", "allow_file": "include"}.get(field, field)
        fields.setdefault(section, {})[field] = getattr(getattr(found, section), field)
    if "values" in asked:
        fields["inputs"]["values"] = {**case.inputs.values, **found.inputs.values}
    changed = {section: replace(getattr(case, section), **new) for section, new in fields.items()}
    return replace(case, **changed)


def data_source(given: object, word: str) -> DataSource:
    """The data of a path or a table as in a spec; messages name it ``word``. Raises `SpecError` if it is neither."""
    try:
        source = InputsSection.model_validate({"evaluation": given}).rules().evaluation
    except ValidationError as error:
        raise error_without_file(error, InputsSection, {"evaluation": given}, name=lambda _: word) from None
    assert source is not None
    return source


def _make_case(data: dict[str, Any], asked: Mapping[str, Any], written: Callable[[str], str]) -> Case:
    """The case of a spec's ``data`` with the options on top of it."""
    for word, value in asked.items():
        if word not in _PLACES:
            known = sorted(_PLACES)
            what = f"unknown word '{word}'{did_you_mean(word, known)}"
            raise ConfigError(what, cure=f"known: {', '.join(known)}")
        if word in _ACCURACY and "accuracy" in asked:
            raise ConfigError(f"accuracy and {word} are both given", cure=f"write {word} inside accuracy")
        if word == "regions" and not isinstance(value, str):
            _put(data, ("regions", "manual"), [list(group) for group in value])
            value = "manual"
        if word == "values" and isinstance(value, Mapping):
            value = {name: one.tolist() if hasattr(one, "tolist") else one for name, one in value.items()}
        _put(data, _PLACES[word], value)
    try:
        bare = BareSpec.model_validate(data)
    except ValidationError as error:

        def find_word(loc: Loc) -> str | None:
            """The option that set a location of the spec, as the caller writes it."""
            exact = (word for word in asked if loc[: len(_PLACES[word])] == _PLACES[word])
            below = (word for word in asked if _PLACES[word][: len(loc)] == loc)
            word = next(chain(exact, below), None)
            return None if word is None else written(word)

        raise error_without_file(error, BareSpec, data, name=find_word) from None
    if bare.tune.accuracy is not None and bare.inputs.evaluation is None:
        word = written(next(word for word in (*_ACCURACY, "accuracy") if word in asked))
        raise ConfigError(
            f"{word}: a task metric is measured on evaluation data, and none is given",
            cure=f"add {written('evaluation')}: an .npz with the model's inputs and 'labels'",
        )
    case = Case(id=bare.name, model=bare.model, **rules_of(bare))
    return replace(case, inputs=replace(case.inputs, batch=bare.batch))


def _put(data: dict[str, Any], place: Sequence[str], value: object) -> None:
    """Set a nested value, creating the tables above it."""
    for key in place[:-1]:
        data = data.setdefault(key, {})
    data[place[-1]] = os.fspath(value) if isinstance(value, os.PathLike) else value
