"""How near a quantized model is to the float model. Its parts load alone.

- `data`, `sources`, `given_data`: samples. `shapes`: the inputs of a case. `metrics`: task metrics on labelled samples.
- `compare`: outputs side by side. `evaluator`: the SQNR of engines on one data set.
- `rehearsal`: the accuracy of any placement, computed with one graph that has a switch for every pair (`switches`).
- `corrections`: better scales and integers at the same placement.
- `input_search`: the smallest input that breaks a limit.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
