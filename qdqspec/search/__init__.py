"""The search: strategies propose placements, and one loop builds, races and selects. The strategies are files.

- `Strategy`: the interface. `SearchSetup`: what a strategy knows at its start. `Proposal`: a placement to build.
- `AccuracyOracle`: predicts the SQNR of a placement without a build.
- `Search`: the loop. `Contest`: who wins. `Limits`: who may win. `confirm`: the finalists built anew, and the choice.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
