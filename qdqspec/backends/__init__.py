"""Inference backends, one module for each. The protocol is `qdqspec.backends.base.Backend`."""
