"""qdqspec: declarative test and tune of Q/DQ placement in ONNX models.

The public names are listed in ``__init__.pyi`` beside this file, as those of each package are. They load on first use,
so that ``import qdqspec`` is fast.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__.append("__version__")
