"""Stands in for NVIDIA's ``cuda.bindings``, over `fake_gpu`."""
