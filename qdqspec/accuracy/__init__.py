"""How near a quantized model is to the float model. Its parts load alone.

- `case_data`: the inputs of a case and their samples (`data`, `sources`). `metrics`: task metrics on them.
- `compare`: outputs side by side. `evaluator`: the SQNR of engines on one data set.
- `rehearsal`: the accuracy of any placement, computed with one graph that has a switch for every pair. `predict`: the
  accuracy that a search will measure. `culprits`: the pairs with the largest error.
- `corrections`: better scales and integers at the same placement.
- `input_search`: the smallest input that breaks a limit. `probes`: such inputs as files.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
