"""Regions of a model, the patches in which users and strategies place pairs, and the patterns that regions share."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
