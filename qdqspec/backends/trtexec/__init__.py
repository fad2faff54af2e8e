"""TensorRT through its command-line tool, versions 10 and 11."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qdqspec.config.hooks import Declaration, attributes_of

if TYPE_CHECKING:
    from qdqspec.backends.trtexec.engine import Trtexec as Trtexec
    from qdqspec.backends.trtexec.engine import TrtexecEngine as TrtexecEngine
    from qdqspec.backends.trtexec.engine import options_from as options_from

declaration = Declaration(
    targets=("trtexec",),
    replay=f"{__name__}.engine:replay_command",
    equivalents={
        "--use_trtexec": "--backend trtexec (tensorrt is the Python API)",
        "--trtexec_benchmark_args": "--backend trtexec --trtexec-args=...",
    },
)

__getattr__ = attributes_of(f"{__name__}.engine", "backend", "Trtexec", "TrtexecEngine", "options_from")
