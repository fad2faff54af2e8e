"""The capabilities of a stand-in for a backend: it runs the engines that it builds."""

from __future__ import annotations

from qdqspec.backends.base import BuildOptions, Capabilities


class RunsModels:
    """A backend for int8 whose engines can be run, and that fuses nothing."""

    def capabilities(self, options: BuildOptions) -> Capabilities:
        return Capabilities(formats=("int8",), labels={}, activations={}, weights={})
