"""Trials and their parts as JSON objects and back, without loss. May import floor 0 only.

Reading is strict: a missing, unknown or wrongly typed key is a ``ValueError``, which the caller turns
into an error that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qdqspec.types import LABELS, Consumer, LayerTime, Placement, Race, Samples, Site, Trial

Json = Mapping[str, Any]

_LAYER_KEYS = ("name", "op_type", "milliseconds", "nodes", "tensors", "boundary", "integer")
_RACE_KEYS = ("opponent", "ratio", "p_value", "pairs", "verdict")
_SITE_KEYS = ("tensor", "consumers", "format", "axis", "weight")
_PLAIN_TRIAL_KEYS = ("phase", "status", "error", "build_seconds", "graph_hash", "incumbent", "ratio")


def samples_to_json(samples: Samples) -> dict[str, Any]:
    """``{"wall_ms": [...], "cpu_ms": [...]}``."""
    return {"wall_ms": list(samples.wall_ms), "cpu_ms": list(samples.cpu_ms)}


def samples_from_json(data: Json) -> Samples:
    """The inverse of `samples_to_json`."""
    return Samples(wall_ms=_floats(data["wall_ms"]), cpu_ms=_floats(data["cpu_ms"]))


def layer_to_json(layer: LayerTime) -> dict[str, Any]:
    """One kernel's time, keys as in `LayerTime`."""
    return {key: getattr(layer, key) for key in _LAYER_KEYS}


def layer_from_json(data: Json) -> LayerTime:
    """The inverse of `layer_to_json`."""
    return LayerTime(
        name=data["name"],
        op_type=data["op_type"],
        milliseconds=float(data["milliseconds"]),
        nodes=tuple(data["nodes"]),
        tensors=tuple(data["tensors"]),
        boundary=bool(data["boundary"]),
        integer=bool(data["integer"]),
    )


def placement_to_json(placement: Placement) -> dict[str, Any]:
    """Sites in a fixed order, and the labels a strategy gave its blocks."""
    sites = sorted(placement.sites, key=lambda s: (s.tensor, s.consumers, s.format, str(s.axis), s.weight))
    return {
        "sites": [{key: getattr(site, key) for key in _SITE_KEYS} for site in sites],
        "labels": [list(pair) for pair in placement.labels],
    }


def placement_from_json(data: Json) -> Placement:
    """The inverse of `placement_to_json`."""
    for _, label in data["labels"]:
        if label not in LABELS:
            raise ValueError(f"unknown label {label!r}")
    return Placement(
        sites=frozenset(_site_from_json(site) for site in data["sites"]),
        labels=tuple((block, label) for block, label in data["labels"]),
    )


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """One journal line. ``placement`` is the digest, ``scheme`` what it resolves to."""
    return {
        "trial": trial.number,
        **{key: getattr(trial, key) for key in _PLAIN_TRIAL_KEYS},
        "placement": trial.placement.digest,
        "scheme": placement_to_json(trial.placement),
        "samples": samples_to_json(trial.samples),
        "layers": [layer_to_json(layer) for layer in trial.layers],
        "race": trial.race and {key: getattr(trial.race, key) for key in _RACE_KEYS},
    }


def trial_from_json(data: Json) -> Trial:
    """The inverse of `trial_to_json`. Raises ``ValueError`` where the object is not a trial."""
    try:
        return _trial_from_json(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a trial: {error!r}") from error


def _trial_from_json(data: Json) -> Trial:
    placement = placement_from_json(data["scheme"])
    if placement.digest != data["placement"]:
        raise ValueError(f"the scheme has digest {placement.digest}, not {data['placement']}")
    if data["status"] not in ("ok", "failed"):
        raise ValueError(f"unknown status {data['status']!r}")
    return Trial(
        number=int(data["trial"]),
        placement=placement,
        samples=samples_from_json(data["samples"]),
        layers=tuple(layer_from_json(layer) for layer in data["layers"]),
        race=_race_from_json(data["race"]) if data["race"] else None,
        **{key: data[key] for key in _PLAIN_TRIAL_KEYS},
    )


def _race_from_json(data: Json) -> Race:
    return Race(**{key: data[key] for key in _RACE_KEYS})


def _site_from_json(data: Json) -> Site:
    consumers = tuple(Consumer(str(node), int(index)) for node, index in data["consumers"])
    return Site(**{**{key: data[key] for key in _SITE_KEYS}, "consumers": consumers})


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
