"""Calibration samples in a file, for programs in environments without qdqspec."""

from __future__ import annotations

from collections import defaultdict

import numpy as np


def read_feeds(path: str) -> list[dict[str, np.ndarray]]:
    """The samples of an ``.npz`` file whose arrays are named ``<sample>/<input>``."""
    samples: dict[int, dict[str, np.ndarray]] = defaultdict(dict)
    with np.load(path) as arrays:  # noqa: TID251 - closed here
        for name in arrays.files:
            number, _, own = name.partition("/")
            samples[int(number)][own] = arrays[name]
    return [samples[number] for number in sorted(samples)]
