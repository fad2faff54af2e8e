"""TensorRT through its command-line tool, versions 10 and 11."""

from __future__ import annotations

from qdqspec._core.hooks import Declaration, attributes_of

declaration = Declaration(
    targets=("trtexec",),
    polygraphy=("--trt",),
    replay=f"{__name__}.engine:replay_command",
    command_line={"args": "More arguments for this tool, quoted as one."},
    equivalents={
        "--use_trtexec": "use --backend trtexec (tensorrt is the Python API)",
        "--trtexec_benchmark_args": "use --backend trtexec --trtexec-args=...",
    },
)

__getattr__ = attributes_of(f"{__name__}.engine", "backend")
