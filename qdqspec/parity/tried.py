"""What came of an input that was tried."""

from __future__ import annotations

from typing import NamedTuple


class Tried(NamedTuple):
    """What an input breaks, in words, and how noisy it was, which is climbed towards more."""

    broken: tuple[str, ...]
    noise: float
