"""Trials as lines of a journal, and build options as messages to child processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qdqspec.backends.base import BuildOptions
from qdqspec.codec import from_data, to_data
from qdqspec.types import InputShape, ShapeProfile, Trial, kind_of

Json = Mapping[str, Any]


def trial_to_json(trial: Trial) -> dict[str, Any]:
    """The fields of a trial, its number as ``trial``; ``placement`` is the digest, ``scheme`` the placement in full."""
    data: dict[str, Any] = to_data(trial)
    return {
        "trial": data.pop("number"),
        **data,
        "placement": trial.placement.digest,
        "scheme": data["placement"],
    }


def trial_from_json(data: Json) -> Trial:
    """The inverse of `trial_to_json`. Raises ``ValueError`` if the object is not a trial."""
    try:
        digest, fields = data["placement"], {"number": data["trial"], "placement": data["scheme"]}
        trial = from_data(Trial, {**data, **fields})
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a trial: {error!r}") from None
    if trial.placement.digest != digest:
        raise ValueError(f"the scheme has digest {trial.placement.digest}, not {digest}")
    for _, label in trial.placement.labels:
        kind_of(label)
    return trial


def options_to_json(options: BuildOptions) -> dict[str, Any]:
    """Build options, for another process."""
    data: dict[str, Any] = to_data(options)
    return {**data, "state": None if options.state is None else str(options.state.absolute())}


def options_from_json(data: Json) -> BuildOptions:
    """The inverse of `options_to_json`, except that a relative folder becomes absolute.

    Not by the codec, whose reading half is slow to import in each child.
    """
    profiles = tuple(
        ShapeProfile(
            weight=profile["weight"], shapes={n: _shape(shape) for n, shape in profile["shapes"].items()}
        )
        for profile in data["profiles"]
    )
    state = None if data["state"] is None else Path(data["state"])
    return BuildOptions(**{**data, "profiles": profiles, "state": state})


def _shape(data: Json) -> InputShape:
    return InputShape(**{name: tuple(dims) for name, dims in data.items()})
