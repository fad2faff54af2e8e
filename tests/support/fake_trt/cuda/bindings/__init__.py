"""A replacement for NVIDIA's ``cuda.bindings`` that uses `fake_gpu`."""
