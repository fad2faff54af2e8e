"""A case from words in Python, with the validation of a spec file. May import floor 0 and pydantic.

``tune("model.onnx", trials=30, deny=["Softmax"])`` says what a spec says in its sections; a case made so has
no checks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias, TypedDict

from pydantic import Field, ValidationError

from qdqspec.errors import ConfigError
from qdqspec.registry import did_you_mean
from qdqspec.spec.evaluation import require_evaluation
from qdqspec.spec.explain import error_without_file
from qdqspec.spec.fields import Section
from qdqspec.spec.inputs import InputsSection
from qdqspec.spec.place import SpecPath
from qdqspec.spec.sections import PatternsSection, QuantizeSection, RegionsSection, TuneSection
from qdqspec.types import Case, Metric

PathLike: TypeAlias = str | os.PathLike[str]
Shape: TypeAlias = Sequence[int] | Mapping[str, Sequence[int]]


class Asked(TypedDict, total=False):
    """What may be said of a model. Paths are relative to the working directory.

    ``regions`` is ``structure``, ``names``, ``fusion``, or groups of node names (wildcards as in a spec), one a
    region; ``graph`` is layer information that says what ``fusion`` joins. ``name`` is the case's id, and its folder
    below ``reports/<model>/``. ``values`` are numbers, lists or arrays. ``metrics`` are task metrics of the caller's
    own by the name that ``accuracy`` or a spec gives them; no spec holds them, so that it holds no code.
    """

    name: str
    quant: str
    calibrate: Literal["max", "percentile", "entropy", "mse"]
    weights: Literal["per-channel", "per-tensor"]
    activations: str
    outputs: bool | Literal["auto"]
    calibration: PathLike
    scales: PathLike
    evaluation: PathLike
    shapes: Mapping[str, Shape]
    values: Mapping[str, Any]
    batch: int
    allow: Sequence[str]
    deny: Sequence[str]
    include: Sequence[str]
    exclude: Sequence[str]
    regions: Literal["structure", "names", "fusion"] | Sequence[Sequence[str]]
    graph: PathLike
    max_nodes: int
    preset: Literal["quick", "default", "extensive"]
    trials: int
    minutes: float
    objective: Literal["latency", "pareto"]
    min_sqnr_db: float | Literal["none"]
    accuracy: Mapping[str, str | float]
    min_gain: float | str
    clock: Literal["auto", "cpu", "wall"]
    float16: bool
    start_from: Sequence[PathLike]
    metrics: Mapping[str, Metric]


class AskedWithStrategy(Asked, total=False):
    """The same, with a search strategy by its name."""

    strategy: str


class BareSpec(Section):
    """A spec without checks, for one case."""

    model: SpecPath
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")] = "default"
    batch: int | None = Field(default=None, ge=1)
    inputs: InputsSection = InputsSection()
    patterns: PatternsSection = PatternsSection()
    regions: RegionsSection = RegionsSection()
    quantize: QuantizeSection = QuantizeSection()
    tune: TuneSection = TuneSection()


# Where each word stands in a spec.
_PLACES = {
    "name": ("name",),
    "batch": ("batch",),
    "quant": ("quantize", "format"),
    "calibrate": ("quantize", "calibration"),
    **{word: ("quantize", word) for word in ("weights", "activations", "outputs")},
    **{word: ("inputs", word) for word in ("calibration", "scales", "evaluation", "shapes", "values")},
    **{word: ("patterns", word) for word in ("allow", "deny")},
    **{word: ("patterns", "nodes", word) for word in ("include", "exclude")},
    "regions": ("regions", "by"),
    "max_nodes": ("regions", "max_nodes"),
    "graph": ("regions", "graph"),
    **{
        word: ("tune", word)
        for word in (
            "strategy", "preset", "trials", "minutes", "objective", "min_sqnr_db", "accuracy", "min_gain", "clock",
            "float16", "start_from",
        )
    },
}  # fmt: skip


def inline_case(model: PathLike, asked: Mapping[str, Any]) -> Case:
    """The case of a model and what is asked of it.

    Raises `ConfigError` for an unknown word, `SpecError` with everything else that is wrong.
    """
    data: dict[str, Any] = {"model": os.fspath(model)}
    for word, value in asked.items():
        if word not in _PLACES:
            known = sorted(_PLACES)
            raise ConfigError(
                f"unknown word '{word}'{did_you_mean(word, known)}", cure=f"known: {', '.join(known)}"
            )
        if word == "regions" and not isinstance(value, str):
            _put(data, ("regions", "manual"), [list(group) for group in value])
            value = "manual"
        if word == "values" and isinstance(value, Mapping):
            value = {name: one.tolist() if hasattr(one, "tolist") else one for name, one in value.items()}
        _put(data, _PLACES[word], value)
    try:
        bare = BareSpec.model_validate(data)
        require_evaluation(bare.inputs, bare.tune)
    except ValidationError as error:
        raise error_without_file(error, BareSpec, data) from None
    return Case(
        id=bare.name,
        model=bare.model,
        inputs=replace(bare.inputs.rules(), batch=bare.batch),
        patterns=bare.patterns.rules(),
        regions=bare.regions.rules(),
        quantize=bare.quantize.rules(),
        tune=bare.tune.rules(),
    )


def _put(data: dict[str, Any], place: Sequence[str], value: object) -> None:
    """Set a value deep inside, making the tables on the way."""
    for key in place[:-1]:
        data = data.setdefault(key, {})
    data[place[-1]] = os.fspath(value) if isinstance(value, os.PathLike) else value
