"""Q/DQ pairs in models. Each part imports the parts above it.

- Numbers: `formats`, `ranges`, `calibrate`, `quantizer`. `capabilities`: the support of a backend.
- The search space: `units`, `unit_finder`, `search_space`, with the reasons against other operators.
- Pairs with ranges found at run time: `dynamic_kernels` for them, and `dynamic_pairs` back.
- Changes of models: `pairs`, `insert`, `excerpt`; `switches` for pairs that a run turns on.
- Scaled channels: `chains` can be scaled, `factors` are chosen, and `equalize` applies them.
- Placements as files: `scheme_file`, `match` for other models; `region_schemes` for later searches.
- Pairs of any tool: `pair_numbers`, `recognize`, `strip`, `import_qdq`, `diff` with `skeleton`, `survival`.
- `lint`: rules that find nodes which a runtime refuses or runs slowly.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
