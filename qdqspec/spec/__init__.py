"""Spec files: read, validated and expanded into cases. Opens YAML only, no model.

- `Spec`: a spec as Python writes it. `load_spec` reads a file.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
