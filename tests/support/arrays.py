"""Arrays of .npz files, closed again: a file that is left open is warned of in whatever test comes later."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def arrays_of(file: Path) -> dict[str, np.ndarray]:
    """All arrays of the file by name."""
    with np.load(file) as arrays:
        return dict(arrays)
