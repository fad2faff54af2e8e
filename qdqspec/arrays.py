"""The types of arrays that modules exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]
Floats: TypeAlias = npt.NDArray[np.float64]
Floats32: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, ...]
Feed: TypeAlias = Mapping[str, Array]  # by input
