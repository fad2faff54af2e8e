"""Q/DQ models on the emulator of Qualcomm's NPU: qdqspec's beside ONNX Runtime's own quantizers for it.

    python benchmarks/qnn.py FOLDER ... [--only NAMES] [--soc sc8380xp] [--samples 8]

Each float model is made static (batch 1) and quantized by `qdqspec.tune` for backend `onnxruntime-qnn`, by
``quantize`` with ``get_qnn_qdq_config`` after ``qnn_preprocess_model``, and by ``quantize_static`` with uint8
activations and int8 weights per channel; all with the same calibration data. The table has nodes on the CPU (without
pairs of inputs, outputs and constants), parts, convolutions in integers, and the SQNR of the worst output against
float: on the emulator, and of the arithmetic that ONNX defines. The emulator is not a device.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize, quantize_static
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config, qnn_preprocess_model
from onnxruntime.tools.onnx_model_utils import make_input_shape_fixed
from real_data import RealModel, find_models
from tabulate import tabulate

import qdqspec
from qdqspec.accuracy.compare import compare_outputs
from qdqspec.app.preparation.runtimes import ARITHMETIC, unfused
from qdqspec.backends.base import BuildOptions, Engine
from qdqspec.backends.isolation.isolated import Isolated
from qdqspec.graph.model import load_model
from qdqspec.types import LayerTime

HEADERS = ("model", "quantizer", "CPU nodes", "parts", "Conv in integers", "emulator dB", "defined dB")
Feeds = list[Mapping[str, np.ndarray]]


class _Reader(CalibrationDataReader):  # type: ignore[misc]  # of a library without types
    def __init__(self, feeds: Iterable[Mapping[str, np.ndarray]]) -> None:
        self._left = iter(feeds)

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        return next(self._left, None)


def main() -> int:
    """Print one line for each model and quantizer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", type=lambda text: text.split(","), default=[])
    parser.add_argument("--soc", default="sc8380xp")
    parser.add_argument("--samples", type=int, default=8)
    asked = parser.parse_args()
    options = BuildOptions(extra={"onnxruntime-qnn.soc": asked.soc})
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in find_models(asked.folders, asked.only, Path(scratch)):
            folder = Path(scratch) / model.name
            folder.mkdir(exist_ok=True)
            rows += _rows(model, folder, options, asked.samples)
            print(tabulate(rows[-3:], HEADERS), file=sys.stderr, flush=True)
    print(tabulate(rows, HEADERS, tablefmt="pipe"))
    return 0


def _rows(model: RealModel, folder: Path, options: BuildOptions, samples: int) -> list[tuple[object, ...]]:
    given = onnx.load(model.path)
    feeds = [{name: array[:1] for name, array in feed.items()} for feed in model.feeds()[:samples]]
    calibration = [{name: array[:1] for name, array in feed.items()} for feed in model.calibration_feeds()]
    for name, array in feeds[0].items():
        make_input_shape_fixed(given.graph, name, array.shape)
    path = folder / "float.onnx"
    onnx.save(given, path)
    data = folder / "calibration.npz"
    np.savez(data, **{name: np.stack([feed[name] for feed in calibration]) for name in feeds[0]})

    def ours(output: Path) -> None:
        found = qdqspec.tune(
            path, backend="onnxruntime-qnn", calibration=data, output=output.parent / "tuned", no_cache=True,
            backend_option=tuple(f"{word}={value}" for word, value in options.extra.items()),
        )  # fmt: skip
        output.write_bytes(found.model.read_bytes())

    def helper(output: Path) -> None:
        before = folder / "preprocessed.onnx"
        source = before if qnn_preprocess_model(path, before) else path
        config = get_qnn_qdq_config(source, _Reader(calibration), per_channel=True)
        quantize(source, output, config)

    def plain(output: Path) -> None:
        quantize_static(
            path, output, _Reader(calibration), quant_format=QuantFormat.QDQ, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip

    made: dict[str, Callable[[Path], None]] = {
        "qdqspec": ours, "get_qnn_qdq_config": helper, "quantize_static": plain
    }  # fmt: skip
    return [
        (model.name, name, *_judged(path, make, folder / f"{name}.onnx", feeds, options))
        for name, make in made.items()
    ]


def _judged(
    reference: Path, make: Callable[[Path], None], output: Path, feeds: Feeds, options: BuildOptions
) -> tuple[object, ...]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            make(output)
        ops = {node.name: node.op_type for node in load_model(output).nodes}
        exact = Isolated(ARITHMETIC)
        with closing(exact), closing(Isolated("onnxruntime-qnn", build_timeout=600.0)) as emulator:
            expected = _outputs(exact.build(reference, unfused(options)), feeds)
            defined = _outputs(exact.build(output, unfused(options)), feeds)
            with closing(emulator.build(output, options)) as engine:
                engine.bind(feeds[0])
                layers = engine.layers(1)
                seen = [engine.run(feed) for feed in feeds]
    except Exception as error:  # noqa: BLE001 - a failure is a row
        return (" ".join(str(error).split())[:90], "", "", "", "")
    return (*_places(layers, ops), _db(expected, seen), _db(expected, defined))


def _outputs(engine: Engine, feeds: Feeds) -> list[Mapping[str, np.ndarray]]:
    with closing(engine):
        return [engine.run(feed) for feed in feeds]


def _db(expected: list[Mapping[str, np.ndarray]], seen: list[Mapping[str, np.ndarray]]) -> str:
    pairs = [(a, dict(zip(a, b.values(), strict=True))) for a, b in zip(expected, seen, strict=True)]
    return f"{compare_outputs(pairs, 'evaluation').sqnr_db:.1f}"


def _places(layers: Iterable[LayerTime], ops: Mapping[str, str]) -> tuple[int, int, str]:
    layers = list(layers)
    convolutions = {name for name, op_type in ops.items() if op_type == "Conv"}
    integers = {node for layer in layers if layer.integer for node in layer.nodes} & convolutions
    parts = {layer.place for layer in layers} - {"cpu"}
    return (
        sum(layer.place == "cpu" for layer in layers),
        len(parts),
        f"{len(integers)} of {len(convolutions)}",
    )


if __name__ == "__main__":
    sys.exit(main())
