"""Measured times; knows no search. Its parts load alone.

- `bench`: builds placements, races them and times them together. `race`: two engines in interleaved pairs, at each of
  the shapes of a case. `together`: several builds of several models in one interleaved run.
- `stats`: intervals and tests.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
