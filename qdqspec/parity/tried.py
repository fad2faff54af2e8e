"""The result of an input that was tried."""

from __future__ import annotations

from typing import NamedTuple


class Tried(NamedTuple):
    """Messages of the limits that an input breaks, and its noise, which the search maximizes."""

    broken: tuple[str, ...]
    noise: float
