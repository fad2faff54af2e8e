"""Runs the numeric tests on other processors by user-mode emulation (QEMU).

    apt-get install qemu-user
    python benchmarks/emulate.py                    # every x86 processor of the list
    python benchmarks/emulate.py haswell nehalem
    python benchmarks/emulate.py cortex-a76 --arm-root DIR --arm-python usr/bin/python3.11 --arm-packages DIR

ONNX Runtime has other integer kernels for each of these processors. First one product is computed: exact or saturated
sums show that ONNX Runtime detects the emulated processor. Then pytest runs tests whose results depend on these
kernels. QEMU 7.2 (Debian 12) emulates AVX2, but not AVX512, VNNI or AMX; `masked_cpu.py` hides VNNI or AVX512 of a real
processor. Times under emulation are not meaningful, so tests that depend on times are excluded.

An Arm processor needs a folder with Arm libraries and an Arm Python (Debian packages unpacked with ``dpkg-deb -x``),
and a folder with unpacked Arm wheels. ONNX Runtime for Arm ends with a segmentation fault if ``/proc/cpuinfo`` is that
of an x86 processor; therefore this program writes one into DIR/proc, which QEMU substitutes for that of the host.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/contracts/test_backends.py",
    "tests/unit/backends/test_cpu.py",
)
TIMED = "times or threads or profile or layers"  # tests that depend on times or on profiles
_A53 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
_A76 = f"{_A53} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Processor:
    """A processor that QEMU emulates, and the integer kernels of ONNX Runtime for it."""

    cpu: str
    kernels: str
    features: str = ""  # features of an Arm processor in /proc/cpuinfo
    part: str = ""


PROCESSORS = {
    "nehalem": Processor(cpu="Nehalem", kernels="SSE2, products in 16 bits widened to 32"),
    "sandybridge": Processor(cpu="SandyBridge", kernels="the same, floating point with AVX"),
    "haswell": Processor(cpu="Haswell", kernels="AVX2, VPMADDUBSW"),
    "epyc-rome": Processor(cpu="EPYC-Rome", kernels="AVX2, VPMADDUBSW"),
    "cortex-a53": Processor(cpu="cortex-a53", kernels="NEON, s8 x s8", features=_A53, part="0xd03"),
    "cortex-a76": Processor(cpu="cortex-a76", kernels="NEON UDOT, SDOT", features=_A76, part="0xd0b"),
    "arm-max": Processor(cpu="max", kernels="NEON UMMLA, SMMLA", features=f"{_A76} i8mm bf16", part="0xd40"),
}


def main() -> int:
    options = _options()
    failed = False
    with tempfile.TemporaryDirectory(prefix="qdqspec-emulate-") as folder:
        for name in options.processors:
            processor = PROCESSORS[name]
            python = _python(processor, options, Path(folder) / name)
            print(f"\n== {name}: {processor.kernels}", flush=True)
            environment = _environment(processor, options)
            subprocess.run([python, "-c", SUMMARY], env=environment, cwd=ROOT, check=False)
            start = time.monotonic()
            done = subprocess.run(
                [python, "-c", _PYTEST, str(python), *_words(processor, options)],
                env=environment,
                cwd=ROOT,
                check=False,
            )
            print(f"{name}: pytest exited with {done.returncode} after {time.monotonic() - start:.0f} s")
            failed |= done.returncode != 0
    return int(failed)


# Otherwise child processes started by Python would run on the real processor.
_PYTEST = (
    "import multiprocessing.spawn as spawn, sys; sys.executable = sys.argv[1]; spawn.set_executable(sys.argv[1]); "
    "import pytest; sys.exit(pytest.main(sys.argv[2:]))"
)
SUMMARY = (
    "import platform, onnxruntime; from qdqspec.backends import _cpu; "
    "from qdqspec.backends.onnxruntime import ops as found; "
    "cpu = _cpu.detect(); print(platform.machine(), 'ONNX Runtime', onnxruntime.__version__, '|', "
    "'sums saturate' if found._measured() else 'sums are exact', '| doctor:', found.describe(cpu))"
)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    x86 = [name for name, processor in PROCESSORS.items() if not processor.features]
    parser.add_argument("processors", nargs="*", metavar="PROCESSOR", help=", ".join(PROCESSORS))
    parser.add_argument(
        "--tests", nargs="+", default=list(TESTS), help="pytest arguments in place of the subset"
    )
    parser.add_argument("--arm-root", type=Path, help="folder with Arm libraries")
    parser.add_argument("--arm-python", default="usr/bin/python3.11", help="Arm Python inside that folder")
    parser.add_argument("--arm-packages", type=Path, help="folder with unpacked Arm wheels")
    options = parser.parse_args()
    options.processors = options.processors or x86
    unknown = set(options.processors) - set(PROCESSORS)
    if unknown:
        parser.error(f"unknown processor {', '.join(sorted(unknown))}; choose from {', '.join(PROCESSORS)}")
    if set(options.processors) - set(x86) and not (options.arm_root and options.arm_packages):
        parser.error("an Arm processor needs --arm-root and --arm-packages")
    return options


def _words(processor: Processor, options: argparse.Namespace) -> list[str]:
    words = ["-q", "-p", "no:cacheprovider", "-k", f"not ({TIMED})", *options.tests]
    # Unpacked wheels do not include the entry point of qdqspec.
    return ["-p", "qdqspec.app.plugin", *words] if processor.features else ["-p", "no:xdist", *words]


def _python(processor: Processor, options: argparse.Namespace, script: Path) -> Path:
    """An executable file that runs Python on that processor."""
    arm = bool(processor.features)
    emulator = shutil.which("qemu-aarch64" if arm else "qemu-x86_64")
    if emulator is None:
        sys.exit("QEMU's user-mode emulation is not installed: apt-get install qemu-user")
    words = [emulator, "-cpu", processor.cpu]
    if arm:
        _write_cpuinfo(processor, options.arm_root)
        words += ["-L", str(options.arm_root), str(options.arm_root / options.arm_python)]
    else:
        words.append(sys.executable)
    script.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
    script.chmod(0o755)
    return script


def _write_cpuinfo(processor: Processor, root: Path) -> None:
    fields = f"Features\t: {processor.features}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x0\n"
    fields += f"CPU part\t: {processor.part}\nCPU revision\t: 0\n"
    (root / "proc").mkdir(exist_ok=True)
    (root / "proc" / "cpuinfo").write_text("".join(f"processor\t: {i}\n{fields}\n" for i in range(2)))


def _environment(processor: Processor, options: argparse.Namespace) -> dict[str, str]:
    paths = [ROOT, *([options.arm_packages] if processor.features else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "ORT_DISABLE_TELEMETRY": "1"}


if __name__ == "__main__":
    sys.exit(main())
