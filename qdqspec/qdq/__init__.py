"""Q/DQ pairs in models. Its parts load alone: lint rules need no search.

- `quantize`: number formats, ranges of tensors, scales and integers.
- `capabilities`: what a backend supports. `space`: the placements that this allows in a model.
- `edit`: inserts pairs. `read`: strips, imports and compares pairs. `scheme`: placements as files.
- `lint`: rules that find nodes which a runtime refuses or runs slowly.
"""
