"""The options of TensorRT, ``tensorrt.WORD=VALUE``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from qdqspec._core.options import PATH, SWITCH, TEXT, declare, one_of, option, plugin_libraries, whole

Tiling: TypeAlias = Literal["none", "fast", "moderate", "full"]
Hardware: TypeAlias = Literal["none", "ampere-plus", "same-compute-capability"]

_NO_TIMING_CACHE = " (0 takes the first kernel that works and does not use the timing cache)"
_OWN = "TensorRT's"  # default, which TensorRT has if the value is None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOptions:
    """Options that all products with TensorRT's API have."""

    plugins: tuple[Path, ...] = plugin_libraries()
    cuda_graph: bool = option(SWITCH, "Whether runs are timed as CUDA graphs where possible.", True)
    warmup_ms: int = option(whole(0), "How long an idle engine runs before it is timed.", 100)
    verbose: bool = option(SWITCH, "Whether the whole log of the compiler goes to the build's.", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtOptions(TimingOptions):
    """Options of building and timing."""

    opt_level: int | None = option(
        whole(1, 5, _NO_TIMING_CACHE), "Builder optimization level.", shown=f"{_OWN} (3)"
    )
    workspace: int | None = option(
        whole(1), "MiB that kernels may use as scratch memory.", shown="all available memory"
    )
    avg_timing: int = option(whole(1), "How often the builder times each kernel.", 8)  # as trtexec
    max_tactics: int | None = option(whole(1), "How many kernels it considers a layer at most.", shown=_OWN)
    tiling: Tiling | None = option(one_of(*get_args(Tiling)), "Tiling optimization.", shown="none")
    aux_streams: int | None = option(whole(0), "Streams an engine may use besides its own.", shown=_OWN)
    tf32: bool = option(SWITCH, "Whether float32 may be computed as TF32.", True)
    sparse: bool = option(SWITCH, "Whether kernels for sparse weights may be chosen.", False)
    hardware: Hardware = option(
        one_of(*get_args(Hardware)), "Other GPUs on which the engine must run.", "none"
    )
    version_compatible: bool = option(
        SWITCH, "Whether the engine must run in later versions of TensorRT.", False
    )
    build_route: str | None = option(
        TEXT,
        "TensorRT 11's compiler knobs, -name=value separated by spaces.",
        shown="the compiler's",
        in_files=False,
    )
    timing_cache: Path | None = option(
        PATH,
        "A timing cache that builds read and extend, kept across runs.",
        shown="one in the run's folder",
        in_files=False,
    )


# In a strongly typed network the model determines all types, and TensorRT 11 has no other kind.
_TYPED = (
    "networks are built strongly typed, in the types the model has",
    "convert the model itself to that type, for example to float16",
)
OPTIONS = declare(
    "tensorrt",
    TensorRtOptions,
    refused=dict.fromkeys(("fp16", "bf16", "int8", "fp8", "int4", "fp4", "best"), _TYPED),
)
