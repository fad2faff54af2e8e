"""Measured times; knows no search. Its parts load alone.

- `bench`: builds placements, races them and times them together. `race`: two engines in interleaved pairs.
- `together`: several builds of several models in one interleaved run. `stats`, `change`: intervals and tests.
- `explained`: which kernels make a model faster or slower. `profiles`: cases with several shapes of their inputs.
- `lock`: one timed run on a device at a time. `store`: the cache folder. `environment`: another interpreter's runtime.
"""
