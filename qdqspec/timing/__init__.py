"""Measured times; knows no search. Its parts load alone.

- `bench`: builds placements, races them and times them together. `race`: two engines in interleaved pairs, at each of
  the shapes of a case. `together`: several builds of several models in one interleaved run.
- `stats`: intervals and tests. `explained`: which kernels make a model faster or slower.
- `lock`: one timed run on a device at a time. `store`: the cache folder. `environment`: another interpreter's runtime.
"""
