"""The options of the emulator, ``onnxruntime-qnn.WORD=VALUE``, and the chips that it knows by name.

The library takes any number of a chip, and any text, without a message: it then computes as for its default, or leaves
all nodes to the CPU. Source: measured with onnxruntime-qnn 2.7.0 (QAIRT 2.51.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from qdqspec._core.config.declared import declare, one_of, option
from qdqspec.errors import BackendUnavailableError


class Chip(NamedTuple):
    """A chip: its number in QNN, and the architecture of its NPU."""

    model: int
    arch: int


# Source: ExecuTorch's qc_schema.py. Each was tried here: the plugin places all nodes of a quantized network on it.
CHIPS: dict[str, Chip] = {
    "sm8350": Chip(30, 68), "sm8450": Chip(36, 69), "sm8550": Chip(43, 73), "sm8635": Chip(68, 73),
    "sm8650": Chip(57, 75), "sm8735": Chip(85, 79), "sm8750": Chip(69, 79), "sm8850": Chip(87, 81),
    "sa8255": Chip(52, 73), "sa8295": Chip(39, 68), "sc8380xp": Chip(60, 73), "ssg2115p": Chip(46, 73),
    "ssg2125p": Chip(58, 73), "sxr1230p": Chip(45, 73),
}  # fmt: skip
CHOOSE = f"set onnxruntime-qnn.soc to one of {', '.join(CHIPS)}"
_NO_TIMES = (
    "an emulator has no power or performance to set: it times nothing",
    "leave it out, and time on a device",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QnnOptions:
    """The options after ``onnxruntime-qnn.`` in the configuration."""

    soc: str = option(one_of(*CHIPS), "The chip whose NPU is emulated (required).", "", shown="none")
    io: str = option(one_of("cpu", "npu"), "Where inputs are quantized and outputs dequantized.", "cpu")
    fallback: str = option(
        one_of("cpu", "none"), "Where nodes run that the NPU does not take; `none`: the build fails.", "cpu"
    )

    @property
    def chip(self) -> Chip:
        """The chip. Raises `BackendUnavailableError` if none was chosen."""
        if not self.soc:
            raise BackendUnavailableError("no chip is chosen for the emulator", cure=CHOOSE)
        return CHIPS[self.soc]


OPTIONS = declare(
    "onnxruntime-qnn",
    QnnOptions,
    refused={
        **dict.fromkeys(("htp-performance-mode", "vtcm-mb", "profiling-level"), _NO_TIMES),
        "htp-arch": ("it is that of the chip", CHOOSE),
        "soc-model": ("a number that the library does not know is taken silently", CHOOSE),
    },
)


def options_from(extra: Mapping[str, str]) -> QnnOptions:
    """Read the options that begin with ``onnxruntime-qnn.``; raise `ConfigError` for an unknown or invalid one."""
    return QnnOptions(**OPTIONS.read(extra))
