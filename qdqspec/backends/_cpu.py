"""The processor of this machine, and its instruction set for products of 8-bit integers.

The instruction set determines whether quantization gains at all, and whether 8-bit weights are safe: ONNX Runtime's
kernels for AVX2 and AVX512 without VNNI add two u8 x s8 products in 16 bits (VPMADDUBSW), which saturates.
"""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qdqspec._core.programs import usable_cores


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """An instruction set for 8-bit products: the flag of /proc/cpuinfo, a slug for device keys, a text for `doctor`."""

    flag: str
    slug: str
    text: str
    saturates: bool | None = False  # None: not known


# In ONNX Runtime's order of preference (MLAS, platform.cpp, 1.31): its AVX512 kernels replace those of AVX-VNNI
# if a processor has both and no AVX512-VNNI. Arm's NEON without dot product adds two s8 x s8 products in 16 bits;
# with weights from -127 to 127, as qdqspec writes them, the sums fit.
_X86 = (
    _Path(flag="amx_int8", slug="amx", text="AMX int8 tiles"),
    _Path(flag="avx512_vnni", slug="avx512-vnni", text="AVX512-VNNI"),
    _Path(flag="avx512bw", slug="avx512", text="AVX512 without VNNI", saturates=True),
    _Path(flag="avx_vnni", slug="avx-vnni", text="AVX-VNNI"),
    _Path(flag="avx2", slug="avx2", text="AVX2 without VNNI", saturates=True),
    _Path(flag="sse2", slug="sse2", text="SSE2"),
)
_ARM = (
    _Path(flag="i8mm", slug="i8mm", text="NEON i8mm"),
    _Path(flag="asimddp", slug="neon-dotprod", text="NEON dot product"),
    _Path(flag="asimd", slug="neon", text="NEON without dot product"),
)
_UNKNOWN = _Path(flag="", slug="", text="not known", saturates=None)
_SYSCTL_FLAGS = {
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.neon": "asimd",
    "hw.optional.avx512vnni": "avx512_vnni",
    "hw.optional.avx512bw": "avx512bw",
    "hw.optional.avx2_0": "avx2",
}
_NOISE = re.compile(
    r"\((?:r|tm)\)|@.*$|\b(?:cpu|processor|version|with radeon.*|\d+-core|\d+(?:st|nd|rd|th) gen)\b", re.I
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A processor: its brand string, instruction-set flags as Linux names them, and usable cores."""

    product: str
    flags: frozenset[str]
    cores: int

    @property
    def saturates(self) -> bool | None:
        """Whether sums of u8 x s8 products saturate according to the flags; None if the flags are not known."""
        return self._path.saturates

    @property
    def may_saturate(self) -> bool:
        """Whether sums must be taken to saturate: unknown flags count as yes."""
        return self.saturates is not False

    def int8_text(self, *, saturates: bool) -> str:
        """The instruction set as a text for `doctor`, with its consequence for weights."""
        remark = "u8 x s8 saturates: 7-bit weights" if saturates else "8-bit weights are exact"
        if self.saturates not in (None, saturates):
            remark += ", as computed here, although the processor's flags mean the opposite"
        return f"{self._path.text} ({remark})"

    def details(self, **facts: object) -> dict[str, str]:
        """The facts beside the device key of a backend on this processor: ``facts``, and the machine."""
        host = {"system": platform.platform(), "python": platform.python_version()}
        own = {name: str(fact) for name, fact in facts.items()}
        return {"cpu": self.product, "cores": str(self.cores), **own, **host}

    @property
    def _path(self) -> _Path:
        return next((path for path in (*_X86, *_ARM) if path.flag in self.flags), _UNKNOWN)

    @property
    def slug(self) -> str:
        """Product and instruction set for device keys: ``intel-xeon-platinum-8480c-amx``."""
        isa = self._path.slug or slug_from_text(platform.machine())
        return f"{slug_from_text(_NOISE.sub(' ', self.product))}-{isa}"

    def key(self, runtime: str, version: str, host: str) -> str:
        """The device key of a runtime on this processor; ``host`` is what else results depend on."""
        return f"{self.slug}-{runtime}-{major_minor(version)}-{host}"


@cache
def detect() -> Cpu:
    """The processor of this machine. Reads the system once; never raises."""
    cores = usable_cores()
    try:
        if platform.system() == "Linux":
            text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
            return cpu_from_cpuinfo(text, cores, machine=platform.machine())
        if platform.system() == "Darwin":
            command = ["sysctl", "machdep.cpu", "hw.optional"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
            return cpu_from_sysctl(done.stdout, cores)
    except (OSError, subprocess.SubprocessError):
        pass  # a sandbox may hide both sources; the fallback has less detail
    return Cpu(product=platform.processor() or platform.machine(), flags=frozenset(), cores=cores)


def cpu_from_cpuinfo(text: str, cores: int, *, machine: str = "") -> Cpu:
    """Read the first processor of ``/proc/cpuinfo``, x86 or ARM.

    Where a hypervisor or ARM hides the brand string, numbers identify the generation.
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = frozenset(fields.get("flags", fields.get("Features", "")).split())
    product = fields.get("model name", machine or "unknown")
    if "CPU part" in fields:
        product = f"{machine or 'arm'} {fields.get('CPU implementer', '')} {fields['CPU part']}"
    elif "cpu family" in fields and not re.search(r"\d", _NOISE.sub(" ", product)):
        product = f"{product} family {fields['cpu family']} model {fields.get('model', '0')}"
    return Cpu(product=product, flags=flags, cores=cores)


def cpu_from_sysctl(text: str, cores: int) -> Cpu:
    """Read the output of ``sysctl machdep.cpu hw.optional`` (macOS)."""
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    flags = frozenset(flag for key, flag in _SYSCTL_FLAGS.items() if fields.get(key, "0").strip() == "1")
    return Cpu(product=fields.get("machdep.cpu.brand_string", platform.machine()), flags=flags, cores=cores)


def slug_from_text(text: str) -> str:
    """Lower case words joined by hyphens, valid in file names."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unknown"


def major_minor(version: str) -> str:
    """``1.32`` of ``1.32.0``."""
    return ".".join(version.split(".")[:2])
