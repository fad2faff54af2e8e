"""Judges evidence of a finished search; never measures. The checks are files of `qdqspec.checks.kinds`.

- `Check`: the interface. `CheckParams`: the keys of every check.
- `Evidence`, `Verdict`, `Section`: what a check receives, and what it returns; `verdict`, `unmeasured` make one.
- `FigureRequest`, `ScoreRequest`: evidence that has parameters.
- `ByteSize`: a size in bytes, such as ``4MiB``. `require_a_limit` refuses a check without limits.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
