"""Static analysis of a model for a target: finds nodes that it refuses or runs slowly, without a build or the target.

`lint_model` is the entry point; each rule is a function that registers itself with a documented id.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
