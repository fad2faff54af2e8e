"""Runs a command with the stand-in for TensorRT on the GPU of this machine: CUDA is real, the engines are not.

    python benchmarks/trt_on_gpu.py 11.4.0.106 python -m pytest tests/device --qdq-backend=tensorrt

The stand-in compiles nothing and computes on the CPU; its runs are kernels of known duration, on streams, in CUDA
graphs, timed by events. Everything around the engine is what runs with TensorRT.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
FAKE = HERE.parent / "tests" / "support" / "fake_trt"
PARTS = (FAKE / "tensorrt", FAKE / "fake_gpu.py", HERE / "real_gpu.py")  # not the CUDA of the stand-in


def main() -> int:
    """Run the command with the stand-in of a version, and return its exit code."""
    version, *command = sys.argv[1:]
    with tempfile.TemporaryDirectory() as made:
        package = Path(made) / f"tensorrt-{version}.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {version}\n")
        for part in PARTS:
            (Path(made) / part.name).symlink_to(part)
        paths = os.pathsep.join([made, *filter(None, [os.environ.get("PYTHONPATH", "")])])
        return subprocess.run(
            command, env={**os.environ, "PYTHONPATH": paths, "FAKE_TRT_GPU": "real"}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
