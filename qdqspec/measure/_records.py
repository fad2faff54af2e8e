"""Converts trials and their parts to JSON objects and back, without loss.

Reading is strict: a missing, unknown or wrongly typed key is a ``ValueError``, which the caller converts to an error
with the file name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qdqspec.backends.base import BuildOptions
from qdqspec.types import (
    Consumer,
    InputShape,
    Interval,
    LayerTime,
    Placement,
    Race,
    Samples,
    ShapeProfile,
    Site,
    Trial,
    kind_of,
)

Json = Mapping[str, Any]
Kinds = Mapping[str, tuple[type, ...]]

# Plain keys of each record, with their JSON types.
_NUMBER = (int, float)
_PLAIN_LAYER = {
    "name": (str,),
    "op_type": (str,),
    "milliseconds": _NUMBER,
    "boundary": (bool,),
    "integer": (bool,),
}
_PLAIN_RACE = {"opponent": (str,), "ratio": _NUMBER, "p_value": _NUMBER, "pairs": (int,), "verdict": (str,)}
_PLAIN_SITE = {"tensor": (str,), "format": (str,), "axis": (int, type(None)), "weight": (bool,)}
_PLAIN_TRIAL = {
    "phase": (str,),
    "status": (str,),
    "error": (str, type(None)),
    "build_seconds": _NUMBER,
    "graph_hash": (str,),
    "incumbent": (bool,),
    "ratio": (*_NUMBER, type(None)),
    "sqnr_db": (*_NUMBER, type(None)),
}
_SOMETIMES: Kinds = {name: (*_NUMBER, type(None)) for name in ("accuracy", "all_data_db", "eps")}


def options_to_json(options: BuildOptions) -> dict[str, Any]:
    """Build options, for another process."""
    profiles = [
        {"weight": p.weight, "shapes": {name: [s.min, s.opt, s.max] for name, s in p.shapes.items()}}
        for p in options.profiles
    ]
    return {
        "threads": options.threads,
        "extra": dict(options.extra),
        "device": options.device,
        "serial": options.serial,
        "profiles": profiles,
        "build_seconds": options.build_seconds,
        "state": None if options.state is None else str(options.state.absolute()),
        "fresh": options.fresh,
    }


def options_from_json(data: Json) -> BuildOptions:
    """The inverse of `options_to_json`, except that a relative folder becomes absolute."""
    state = data["state"]
    return BuildOptions(
        threads=data["threads"],
        extra=data["extra"],
        device=data["device"],
        serial=data["serial"],
        profiles=tuple(_profile_from_json(profile) for profile in data["profiles"]),
        build_seconds=data["build_seconds"],
        state=None if state is None else Path(state),
        fresh=data["fresh"],
    )


def _profile_from_json(data: Json) -> ShapeProfile:
    shapes = {name: [tuple(shape) for shape in spans] for name, spans in data["shapes"].items()}
    return ShapeProfile(
        weight=data["weight"],
        shapes={
            name: InputShape(min=low, opt=usual, max=high) for name, (low, usual, high) in shapes.items()
        },
    )


def samples_to_json(samples: Samples) -> dict[str, Any]:
    """``{"wall_ms": [...], "cpu_ms": [...]}``, with ``notes``, ``profiles`` and ``first`` if not empty."""
    notes = {"notes": list(samples.notes)} if samples.notes else {}
    own = {"profiles": [samples_to_json(part) for part in samples.profiles]} if samples.profiles else {}
    first = {"first": samples_to_json(samples.first)} if samples.first else {}
    return {"wall_ms": list(samples.wall_ms), "cpu_ms": list(samples.cpu_ms), **notes, **own, **first}


def samples_from_json(data: Json) -> Samples:
    """The inverse of `samples_to_json`."""
    notes = _texts(data.get("notes", []))
    profiles = tuple(samples_from_json(part) for part in data.get("profiles", []))
    wall_ms, cpu_ms = _floats(data["wall_ms"]), _floats(data["cpu_ms"])
    first = samples_from_json(data["first"]) if "first" in data else None
    return Samples(wall_ms=wall_ms, cpu_ms=cpu_ms, notes=notes, profiles=profiles, first=first)


def layer_to_json(layer: LayerTime) -> dict[str, Any]:
    """One kernel's time, keys as in `LayerTime`; ``precision`` if the runtime reports it."""
    told = {"precision": layer.precision} if layer.precision else {}
    return {
        **_plain_of(layer, _PLAIN_LAYER),
        "nodes": list(layer.nodes),
        "tensors": list(layer.tensors),
        **told,
    }


def layer_from_json(data: Json) -> LayerTime:
    """The inverse of `layer_to_json`."""
    nodes, tensors = _texts(data["nodes"]), _texts(data["tensors"])
    (precision,) = _texts([data.get("precision", "")])
    return LayerTime(**_plain_from(data, _PLAIN_LAYER), nodes=nodes, tensors=tensors, precision=precision)


def placement_to_json(placement: Placement) -> dict[str, Any]:
    """Sites in a fixed order, and the labels that a strategy gave its blocks."""
    sites = sorted(placement.sites, key=lambda s: (s.tensor, s.consumers, s.format, str(s.axis), s.weight))
    return {
        "sites": [{**_plain_of(s, _PLAIN_SITE), "consumers": [list(c) for c in s.consumers]} for s in sites],
        "labels": [list(pair) for pair in placement.labels],
    }


def placement_from_json(data: Json) -> Placement:
    """The inverse of `placement_to_json`."""
    labels = tuple((block, label) for block, label in data["labels"])
    for _, label in labels:
        kind_of(label)
    return Placement(sites=frozenset(_site_from_json(site) for site in data["sites"]), labels=labels)


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """One journal line. ``placement`` is the digest, ``scheme`` the resolved placement.

    ``subgraph`` (the part built), ``accuracy`` (a task metric), ``all_data_db``, ``eps`` (the smallest significant
    difference) and ``rival`` (the opponent's samples, paired with its own) are present only if known.
    """
    part: dict[str, Any] = {"subgraph": list(trial.subgraph)} if trial.subgraph else {}
    part |= {name: value for name in _SOMETIMES if (value := getattr(trial, name)) is not None}
    part |= {"rival": samples_to_json(trial.rival)} if trial.rival.wall_ms else {}
    return {
        "trial": trial.number,
        **_plain_of(trial, _PLAIN_TRIAL),
        **part,
        "placement": trial.placement.digest,
        "scheme": placement_to_json(trial.placement),
        "samples": samples_to_json(trial.samples),
        "layers": [layer_to_json(layer) for layer in trial.layers],
        "race": trial.race and _race_to_json(trial.race),
    }


def trial_from_json(data: Json) -> Trial:
    """The inverse of `trial_to_json`. Raises ``ValueError`` if the object is not a trial."""
    try:
        return _trial_from_json(data)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a trial: {error!r}") from error


def _trial_from_json(data: Json) -> Trial:
    placement = placement_from_json(data["scheme"])
    if placement.digest != data["placement"]:
        raise ValueError(f"the scheme has digest {placement.digest}, not {data['placement']}")
    _one_of(data, "status", ("ok", "failed"))
    return Trial(
        number=_plain_from(data, {"trial": (int,)})["trial"],
        placement=placement,
        samples=samples_from_json(data["samples"]),
        rival=samples_from_json(data["rival"]) if "rival" in data else Samples(),
        layers=tuple(layer_from_json(layer) for layer in data["layers"]),
        race=_race_from_json(data["race"]) if data["race"] else None,
        subgraph=_texts(data.get("subgraph", [])),
        **_plain_from({key: data.get(key) for key in _SOMETIMES}, _SOMETIMES),
        **_plain_from(data, _PLAIN_TRIAL),
    )


def _race_to_json(race: Race) -> dict[str, Any]:
    known = race.interval
    bounds = {} if known is None else {"interval": [known.median, known.low, known.high]}
    return {**_plain_of(race, _PLAIN_RACE), **bounds}


def _race_from_json(data: Json) -> Race:
    _one_of(data, "verdict", ("faster", "slower", "no difference", "same graph"))
    interval = None
    if "interval" in data:
        median, low, high = _floats(data["interval"])
        interval = Interval(median=median, low=low, high=high)
    return Race(**_plain_from(data, _PLAIN_RACE), interval=interval)


def _site_from_json(data: Json) -> Site:
    consumers = tuple(Consumer(*_checked(end, (str, int))) for end in data["consumers"])
    return Site(**_plain_from(data, _PLAIN_SITE), consumers=consumers)


def _plain_of(record: object, keys: Kinds) -> dict[str, Any]:
    return {key: getattr(record, key) for key in keys}


def _plain_from(data: Json, keys: Kinds) -> dict[str, Any]:
    for key, kinds in keys.items():
        # JSON's true is an int in Python, but not a number here.
        if type(data[key]) not in kinds:
            raise ValueError(f"'{key}' is {data[key]!r:.40}")
    return {key: data[key] for key in keys}


def _one_of(data: Json, key: str, known: tuple[str, ...]) -> None:
    if data[key] not in known:
        raise ValueError(f"'{key}' is {data[key]!r:.40}")


def _checked(values: Any, kinds: tuple[type, ...]) -> list[Any]:
    if len(values) != len(kinds) or any(type(v) is not k for v, k in zip(values, kinds, strict=True)):
        raise ValueError(f"{values!r:.40} is no consumer")
    return list(values)


def _texts(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{values!r:.40} is no list of names")
    return tuple(values)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
