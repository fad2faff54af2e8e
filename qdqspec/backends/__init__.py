"""Runtimes, one folder each: each builds engines of models, runs them and times their layers.

- `Backend`, `Engine`: the interface. `BuildOptions`: what a build depends on; `PLAIN`: one without options.
- `Availability`, `Capabilities`, `Exported`: what a backend tells of this machine, of Q/DQ models and of its engines.
- `Declaration`, `attributes_of`: names of a backend's parts, which load when they are used.
- `BackendOptions`: the base of a backend's options. `backend_named` finds a backend.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
