"""Arrays of .npz files, which are closed: an open file would cause a warning in a later test."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def arrays_of(file: Path) -> dict[str, np.ndarray]:
    """All arrays of the file by name."""
    with np.load(file) as arrays:
        return dict(arrays)
