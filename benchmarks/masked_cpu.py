"""Runs a command as if this x86 processor had fewer instructions, at full speed.

    apt-get install gcc binutils                                      # Linux only; the kernel must allow `unshare`
    .venv/bin/python benchmarks/masked_cpu.py avx512 .venv/bin/pytest specs
    .venv/bin/python benchmarks/masked_cpu.py avx2 .venv/bin/pytest tests

`emulate.py` is for processors that QEMU emulates; QEMU has no AVX512. ONNX Runtime and OpenVINO select their kernels by
the instruction CPUID. In copies of their libraries, each CPUID is replaced by an invalid instruction, and a preloaded
handler of SIGILL returns the result of CPUID without the bits of the hidden instructions. The kernels are the real
ones. The copies, and a ``/proc/cpuinfo`` without these flags, are bind-mounted over the originals in a mount namespace
of the command. Disassembling the libraries takes 20 s.

First one product is computed: saturated sums show that ONNX Runtime detects the masked processor. All other libraries
(NumPy, Node) detect the real one.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from emulate import ROOT, SUMMARY

LIBRARIES = {
    "onnxruntime": ("capi/onnxruntime_pybind11_state*.so",),
    "openvino": ("libs/libopenvino.so.*", "libs/libopenvino_intel_cpu_plugin.so"),
}
CPUID = b"\x0f\xa2"
INVALID = b"\x06\x90"  # PUSH ES, which 64-bit mode does not have, and NOP

# Flags of /proc/cpuinfo: leaf and sub-leaf of CPUID, register (EAX, EBX, ECX, EDX) and bit.
_VNNI = {
    "avx512_vnni": (7, 0, 2, 11),
    "avx512_4vnniw": (7, 0, 3, 2),
    "amx_bf16": (7, 0, 3, 22),
    "amx_tile": (7, 0, 3, 24),
    "amx_int8": (7, 0, 3, 25),
    "avx_vnni": (7, 1, 0, 4),
    "amx_fp16": (7, 1, 0, 21),
    "avx_vnni_int8": (7, 1, 3, 4),
    "avx_vnni_int16": (7, 1, 3, 10),
    "avx10": (7, 1, 3, 19),
}
_LATER_AVX512 = {  # the instructions of Skylake remain
    "avx512vbmi": (7, 0, 2, 1),
    "avx512_vbmi2": (7, 0, 2, 6),
    "avx512_bitalg": (7, 0, 2, 12),
    "avx512_vpopcntdq": (7, 0, 2, 14),
    "avx512_4fmaps": (7, 0, 3, 3),
    "avx512_vp2intersect": (7, 0, 3, 8),
    "avx512_fp16": (7, 0, 3, 23),
    "avx512_bf16": (7, 1, 0, 5),
}
_AVX512 = {
    "avx512f": (7, 0, 1, 16),
    "avx512dq": (7, 0, 1, 17),
    "avx512ifma": (7, 0, 1, 21),
    "avx512cd": (7, 0, 1, 28),
    "avx512bw": (7, 0, 1, 30),
    "avx512vl": (7, 0, 1, 31),
}
HIDDEN = {  # by name of the remaining processor
    "avx512": {**_VNNI, **_LATER_AVX512},
    "avx2": {**_VNNI, **_LATER_AVX512, **_AVX512},
}

HANDLER = """
#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <signal.h>
#include <ucontext.h>

static const struct { unsigned leaf, subleaf, reg, bit; } hidden[] = {%s};
static int (*set_action)(int, const struct sigaction *, struct sigaction *);

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    unsigned leaf = regs[REG_RAX], subleaf = regs[REG_RCX], out[4];
    if (*(const unsigned short *)regs[REG_RIP] != %#06x) {  /* not ours: end as without a handler */
        signal(number, SIG_DFL);
        return;
    }
    __cpuid_count(leaf, subleaf, out[0], out[1], out[2], out[3]);
    for (unsigned i = 0; i < sizeof hidden / sizeof *hidden; i++)
        if (hidden[i].leaf == leaf && hidden[i].subleaf == subleaf) out[hidden[i].reg] &= ~(1u << hidden[i].bit);
    regs[REG_RAX] = out[0]; regs[REG_RBX] = out[1]; regs[REG_RCX] = out[2]; regs[REG_RDX] = out[3];
    regs[REG_RIP] += 2;
}

/* Python's faulthandler, which pytest enables, would replace the handler. */
int sigaction(int number, const struct sigaction *new, struct sigaction *old) {
    if (!set_action) set_action = dlsym(RTLD_NEXT, "sigaction");
    return set_action(number, number == SIGILL ? 0 : new, old);
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(0, 0, 0);
    set_action(SIGILL, &action, 0);
}
"""
MOUNT = 'while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit; shift 2; done; shift; exec "$@"'


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("processor", choices=HIDDEN)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    hidden = HIDDEN[options.processor]
    with tempfile.TemporaryDirectory(prefix="qdqspec-masked-") as name:
        folder = Path(name)
        mounts = _copies(folder) + _cpuinfo(folder, set(hidden))
        namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        masked = [*namespace, "sh", "-c", MOUNT, "sh", *mounts, "--"]
        environment = os.environ | {"LD_PRELOAD": str(_handler(folder, hidden))}
        subprocess.run([*masked, sys.executable, "-c", SUMMARY], env=environment, cwd=ROOT, check=True)
        return subprocess.run([*masked, *options.command], env=environment, check=False).returncode


def _handler(folder: Path, hidden: dict[str, tuple[int, int, int, int]]) -> Path:
    """Compile the handler as a shared library for preloading."""
    library = folder / "handler.so"
    rows = ", ".join(f"{{{', '.join(map(str, bit))}}}" for bit in hidden.values())
    source = HANDLER % (rows, int.from_bytes(INVALID, "little"))
    words = ["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(words, input=source, text=True, check=True)
    return library


def _cpuinfo(folder: Path, hidden: set[str]) -> list[str]:
    """A /proc/cpuinfo without these flags, as source and target of a mount."""
    path = folder / "cpuinfo"
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    path.write_text(re.sub(r"\b\w+\b", lambda word: "" if word[0] in hidden else word[0], text))
    return [str(path), "/proc/cpuinfo"]


def _copies(folder: Path) -> list[str]:
    """Copies of the libraries that call the handler instead of CPUID, as sources and targets of mounts."""
    mounts = []
    for package, patterns in LIBRARIES.items():
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            for library in (path for pattern in patterns for path in Path(place).glob(pattern)):
                content = bytearray(library.read_bytes())
                for offset in _cpuid_offsets(library, content):
                    if content[offset : offset + 2] != CPUID:
                        raise SystemExit(f"no CPUID at {offset:#x} of {library}")
                    content[offset : offset + 2] = INVALID
                (folder / library.name).write_bytes(content)
                mounts += [str(folder / library.name), str(library)]
    return mounts


def _cpuid_offsets(library: Path, content: bytes) -> list[int]:
    """The offsets of CPUID instructions in the file of the library."""
    words = ["objdump", "--disassemble", "--no-show-raw-insn", str(library)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        addresses = [
            int(line.split(":")[0], 16) for line in process.stdout if line.rstrip().endswith("\tcpuid")
        ]
    if process.returncode or not addresses:
        raise SystemExit(f"no CPUID instruction found in {library}")
    # ELF, 64 bits: the table of segments, each with type, flags, offset, address, physical address, size in the file.
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    segments = [struct.unpack_from("<IIQQQQ", content, table + index * size) for index in range(count)]
    return [
        address - start + offset
        for address in addresses
        for kind, _, offset, start, _, length in segments
        if kind == 1 and start <= address < start + length
    ]


if __name__ == "__main__":
    sys.exit(main())
