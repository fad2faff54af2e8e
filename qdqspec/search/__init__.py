"""The search: strategies propose placements, and one loop builds, races and selects. The strategies are files.

- `Strategy`: the interface. `SearchSetup`: what a strategy knows at its start. `Proposal`: a placement to build.
- `AccuracyOracle`: predicts the SQNR of a placement without a build.
- `Search`: the loop. `Contest`: who wins. `Limits`: who may win.
"""

from __future__ import annotations

from qdqspec.search.base import Proposal, SearchSetup, Strategy
from qdqspec.search.guide import AccuracyOracle
from qdqspec.search.limits import Limits
from qdqspec.search.loop import Contest, Search

__all__ = ["AccuracyOracle", "Contest", "Limits", "Proposal", "Search", "SearchSetup", "Strategy"]
