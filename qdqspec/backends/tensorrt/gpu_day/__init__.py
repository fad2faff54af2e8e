"""A first day of TensorRT on a GPU: builds, runs and times small models, and writes one archive of all recordings.

`qdqspec doctor --backend tensorrt --bundle FILE.tgz` calls it; ``docs/gpu-day.md`` describes the archive.
"""
