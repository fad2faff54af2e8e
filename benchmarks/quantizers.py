"""ONNX Runtime's quantizers with their usual settings, as references for benchmarks.

`quantize_static`: Q/DQ, uint8 activations, int8 weights per channel, after ONNX Runtime's pre-processing, or without
it if that fails. `quantize_dynamic`: int8 weights per channel. Both use 7-bit weights if the u8 x s8 products of this
CPU saturate. A failure of a tool is returned as a sentence.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

import onnx
import onnxruntime as ort
from independent import Feed, open_session, reason_of
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

from qdqspec.backends.onnxruntime import backend
from qdqspec.graph.protos import all_graphs

SATURATES = bool(backend().capabilities().reduce_range)
FATAL = 4
QUANTIZED = frozenset(
    {
        "ConvInteger",
        "DequantizeLinear",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "QGemm",
    }
)


class _Reader(CalibrationDataReader):
    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Feed | None:
        return next(self._feeds, None)


def static(model: Path, feeds: Sequence[Feed], output: Path, *, seven_bits: bool = SATURATES) -> str:
    """Write the model of `quantize_static`; the reason of a failure, or an empty text."""

    def quantize(source: Path) -> None:
        quantize_static(
            str(source),
            str(output),
            _Reader(feeds),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            reduce_range=seven_bits,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )

    return _written(model, output, quantize)


def dynamic(model: Path, output: Path, *, seven_bits: bool = SATURATES) -> str:
    """Write the model of `quantize_dynamic`; the reason of a failure, or an empty text."""

    def quantize(source: Path) -> None:
        quantize_dynamic(
            str(source), str(output), per_channel=True, reduce_range=seven_bits, weight_type=QuantType.QInt8
        )

    return _written(model, output, quantize)


def _written(model: Path, output: Path, quantize: Callable[[Path], None]) -> str:
    """Quantize the pre-processed model, or the original if that fails; then check whether it loads."""
    ort.set_default_logger_severity(FATAL)
    logging.disable(logging.WARNING)  # a warning recommends the pre-processing that is used here
    output.parent.mkdir(parents=True, exist_ok=True)
    prepared = output.with_suffix(".preprocessed.onnx")
    why = ""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        for pre_process in (True, False):
            try:
                if pre_process:
                    quant_pre_process(str(model), str(prepared), skip_symbolic_shape=True)
                quantize(prepared if pre_process else model)
                open_session(output)
            except Exception as error:  # noqa: BLE001 - the reason is the result
                why = why or reason_of(error)
            else:
                why = "" if _is_quantized(output) else "it quantized nothing"
                break
    prepared.unlink(missing_ok=True)
    return why


def _is_quantized(path: Path) -> bool:
    graphs = all_graphs(onnx.load(path, load_external_data=False).graph)
    return any(node.op_type in QUANTIZED for graph in graphs for node in graph.node)
