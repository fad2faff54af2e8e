"""The name of a processor, and whether sums of 8-bit products saturate: by its flags, and by a computation."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from onnx_text import outputs_of, saved

from qdqspec.backends import _cpu
from qdqspec.backends._cpu import Cpu
from qdqspec.backends.onnxruntime import ops
from qdqspec.backends.onnxruntime.engine import OnnxRuntime

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz
flags\t\t: fpu sse2 avx2 avx512f avx512bw avx512_vnni amx_tile amx_int8

processor\t: 1
model name\t: something else
"""
EPYC_GUEST = (
    "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\nflags\t\t: avx2 avx512bw avx512_vnni avx_vnni\n"
)
HASWELL = "model name\t: Intel(R) Xeon(R) CPU E5-2680 v3 @ 2.50GHz\nflags\t\t: avx avx2 fma\n"
GRAVITON = "Features\t: fp asimd asimdhp asimddp i8mm\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
RASPBERRY = "Features\t: fp asimd crc32\nCPU implementer\t: 0x41\nCPU part\t: 0xd08\n"
ALDER_LAKE = "model name\t: 12th Gen Intel(R) Core(TM) i7-12700K\nflags\t\t: sse2 avx2 avx_vnni\n"
# A hypervisor may hide AVX512-VNNI but not AVX-VNNI: ONNX Runtime then takes its AVX512 kernels, which saturate.
MASKED = (
    "model name\t: Intel Xeon Processor\nflags\t\t: sse2 avx2 avx512f avx512dq avx512bw avx512vl avx_vnni\n"
)


MAC = (
    "machdep.cpu.brand_string: Apple M2 Pro\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_I8MM: 0\n"
)


@pytest.mark.parametrize(
    ("text", "machine", "slug", "saturates"),
    [
        pytest.param(XEON, "x86_64", "intel-xeon-platinum-8480c-amx", False, id="amx"),
        pytest.param(EPYC_GUEST, "x86_64", "amd-epyc-family-26-model-2-avx512-vnni", False, id="guest"),
        pytest.param(HASWELL, "x86_64", "intel-xeon-e5-2680-v3-avx2", True, id="avx2"),
        pytest.param(GRAVITON, "aarch64", "aarch64-0x41-0xd40-i8mm", False, id="arm-i8mm"),
        pytest.param(RASPBERRY, "aarch64", "aarch64-0x41-0xd08-neon", False, id="arm-without-dot-product"),
        pytest.param(ALDER_LAKE, "x86_64", "intel-core-i7-12700k-avx-vnni", False, id="avx-vnni"),
        pytest.param(MASKED, "x86_64", "intel-xeon-avx512", True, id="avx512-replaces-avx-vnni"),
        pytest.param(MAC, "mac", "apple-m2-pro-neon-dotprod", False, id="mac"),
    ],
)
def test_name_and_saturation_of_processors(text: str, machine: str, slug: str, saturates: bool) -> None:
    is_mac = machine == "mac"
    cpu = _cpu.cpu_from_sysctl(text, 8) if is_mac else _cpu.cpu_from_cpuinfo(text, 4, machine=machine)
    assert cpu.slug == slug
    assert cpu.saturates is saturates


@given(st.text())
def test_any_processor_name_gives_a_valid_file_name(text: str) -> None:
    for cpu in (_cpu.cpu_from_cpuinfo(text, 1), _cpu.cpu_from_sysctl(text, 1)):
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*", cpu.slug)


# ---- computed overflow -----------------------------------------------------------------------------

HASWELL = Cpu(product="Haswell", flags=frozenset({"sse2", "avx2"}), cores=1)
ICE_LAKE = Cpu(product="Ice Lake", flags=frozenset({"avx2", "avx512bw", "avx512_vnni"}), cores=1)
UNKNOWN = Cpu(product="", flags=frozenset(), cores=1)
CONTRARY = ", as computed here, although the processor's flags mean the opposite"


def test_capabilities_agree_with_a_quantized_convolution(tmp_path: Path) -> None:
    """A convolution with the largest weights and activations, which is another kernel than the probed one."""
    text = """conv (uint8[1,4,6,6] x) => (uint8[1,8,4,4] y)
        <float one = {1}, uint8 z = {0}, int8 zw = {0}, float big = {4572}> {
        y = QLinearConv(x, one, z, w, one, zw, big, z)
    }"""  # the exact sum is 255 times 36 * 127
    path = saved(tmp_path / "conv.onnx", text, w=np.full((8, 4, 3, 3), 127, np.int8))
    (found,) = outputs_of(path, {"x": np.full((1, 4, 6, 6), 255, np.uint8)}, "ENABLE_ALL")
    assert bool((found < 255).any()) is OnnxRuntime().capabilities().reduce_range


@pytest.mark.parametrize(
    ("computed", "cpu", "expected", "text"),
    [
        (False, ICE_LAKE, False, "AVX512-VNNI (8-bit weights are exact)"),
        (False, HASWELL, False, f"AVX2 without VNNI (8-bit weights are exact{CONTRARY})"),
        (None, HASWELL, True, "AVX2 without VNNI (u8 x s8 saturates: 7-bit weights)"),
        (None, UNKNOWN, True, "not known (u8 x s8 saturates: 7-bit weights)"),
    ],
)
def test_the_computed_overflow_takes_precedence_over_processor_flags(
    monkeypatch: pytest.MonkeyPatch, computed: bool | None, cpu: Cpu, expected: bool, text: str
) -> None:
    """Without ONNX Runtime nothing is computed."""
    if computed is None:
        monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = ops._measured.__wrapped__() if computed is None else computed
    monkeypatch.setattr(ops, "_measured", lambda: found)
    assert ops.overflows(cpu) is expected
    assert ops.describe(cpu) == text
