"""Names for the package of a backend, which load neither numpy nor a runtime."""

from qdqspec._core.hooks import Declaration as Declaration, attributes_of as attributes_of
from qdqspec._core.options import BackendOptions as BackendOptions
