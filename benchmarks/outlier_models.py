"""Writes small models with data whose channel ranges differ as published for large models.

    python benchmarks/outlier_models.py FOLDER

`prenorm_*`: a pre-normalization transformer; in ``prenorm_outliers`` a few fixed channels after each
LayerNormalization are 20 to 60 times as large as the others (arXiv 2211.10438, figures 1 and 4). `separable_*`:
depthwise and pointwise convolutions with Relu; in ``separable_outliers`` the channels differ by up to 64 times (arXiv
1906.04721, figure 2). Weights are random. The next weights are divided by the same factors, so that both models of a
kind compute the same function up to rounding: the error differs only because of the ranges.
`benchmarks/corrections.py FOLDER` reads the files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH, HEADS, TOKENS, BLOCKS = 64, 4, 32, 3
CHANNELS, SIZE, STAGES = 32, 16, 4
OUTLIERS = 4  # channels of a normalization
CALIBRATION, EVALUATION = 16, 32  # samples


class _Graph:
    def __init__(self, shape: list[int]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self.shape = shape

    def constant(self, values: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        kept = values if values.dtype == np.int64 else values.astype(np.float32)
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(kept), name))
        return name

    def add(self, op: str, *inputs: str, **attributes: object) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def linear(self, source: str, weight: np.ndarray, bias: np.ndarray) -> str:
        return self.add("Add", self.add("MatMul", source, self.constant(weight)), self.constant(bias))

    def write(self, path: Path, output: str, draw: np.random.Generator) -> None:
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            self.nodes,
            path.stem,
            [value("x", TensorProto.FLOAT, self.shape)],
            [value(output, TensorProto.FLOAT, None)],
            self.constants,
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        for name, count in (("calibration", CALIBRATION), ("evaluation", EVALUATION)):
            samples = draw.standard_normal((count, *self.shape[1:])).astype(np.float32)
            np.savez(path.with_name(f"{path.stem}_{name}.npz"), x=samples)


def prenorm(folder: Path, name: str, *, outliers: bool) -> None:
    """A transformer with the normalizations before attention and the linear layers; GELU by the error function."""
    draw, own = np.random.default_rng(0), np.random.default_rng(1)
    g = _Graph([1, TOKENS, WIDTH])

    def weight(rows: int, columns: int) -> np.ndarray:
        return draw.standard_normal((rows, columns)) / np.sqrt(rows)

    def normalized(source: str) -> tuple[str, np.ndarray]:
        factors = np.ones(WIDTH)
        if outliers:
            factors[own.choice(WIDTH, OUTLIERS, replace=False)] = own.uniform(20, 60, OUTLIERS)
        scale, bias = 1 + 0.1 * draw.standard_normal(WIDTH), 0.1 * draw.standard_normal(WIDTH)
        made = g.add("LayerNormalization", source, g.constant(scale * factors), g.constant(bias * factors))
        return made, factors[:, None]

    def heads(source: str, order: list[int]) -> str:
        shape = g.constant(np.array([1, TOKENS, HEADS, WIDTH // HEADS], np.int64))
        return g.add("Transpose", g.add("Reshape", source, shape), perm=order)

    stream = "x"
    for _ in range(BLOCKS):
        seen, factors = normalized(stream)
        q, k, v = (
            g.linear(seen, weight(WIDTH, WIDTH) / factors, 0.1 * draw.standard_normal(WIDTH))
            for _ in range(3)
        )
        scores = g.add("MatMul", heads(q, [0, 2, 1, 3]), heads(k, [0, 2, 3, 1]))
        scores = g.add("Div", scores, g.constant(np.array(np.sqrt(WIDTH / HEADS))))
        mixed = g.add("MatMul", g.add("Softmax", scores, axis=-1), heads(v, [0, 2, 1, 3]))
        mixed = g.add("Transpose", mixed, perm=[0, 2, 1, 3])
        mixed = g.add("Reshape", mixed, g.constant(np.array([1, TOKENS, WIDTH], np.int64)))
        stream = g.add("Add", stream, g.linear(mixed, weight(WIDTH, WIDTH), np.zeros(WIDTH)))
        seen, factors = normalized(stream)
        wide = g.linear(seen, weight(WIDTH, 4 * WIDTH) / factors, 0.1 * draw.standard_normal(4 * WIDTH))
        error = g.add("Erf", g.add("Div", wide, g.constant(np.array(np.sqrt(2.0)))))
        wide = g.add(
            "Mul",
            g.add("Mul", wide, g.add("Add", error, g.constant(np.array(1.0)))),
            g.constant(np.array(0.5)),
        )
        stream = g.add("Add", stream, g.linear(wide, weight(4 * WIDTH, WIDTH), np.zeros(WIDTH)))
    seen, factors = normalized(stream)
    g.write(folder / f"{name}.onnx", g.linear(seen, weight(WIDTH, 10) / factors, np.zeros(10)), draw)


def separable(folder: Path, name: str, *, outliers: bool) -> None:
    """Depthwise and pointwise convolutions with Relu, a global pool, and a linear layer."""
    draw, own = np.random.default_rng(2), np.random.default_rng(3)
    g = _Graph([1, 3, SIZE, SIZE])

    def convolved(
        source: str, rows: int, columns: int, kernel: int, before: np.ndarray, group: int
    ) -> tuple[str, np.ndarray]:
        after = 2.0 ** own.uniform(-3, 3, rows) if outliers else np.ones(rows)
        weight = draw.standard_normal((rows, columns, kernel, kernel)) / np.sqrt(
            columns * kernel * kernel / 2
        )
        weight *= after[:, None, None, None]
        weight /= before[:, None, None, None] if group > 1 else before[None, :, None, None]
        bias = 0.1 * draw.standard_normal(rows) * after
        pads = [kernel // 2] * 4
        made = g.add("Conv", source, g.constant(weight), g.constant(bias), pads=pads, group=group)
        return g.add("Relu", made), after

    now, factors = convolved("x", CHANNELS, 3, 3, np.ones(3), 1)
    for _ in range(STAGES):
        now, factors = convolved(now, CHANNELS, 1, 3, factors, CHANNELS)
        now, factors = convolved(now, CHANNELS, CHANNELS, 1, factors, 1)
    now = g.add("Flatten", g.add("GlobalAveragePool", now))
    weight = draw.standard_normal((CHANNELS, 10)) / np.sqrt(CHANNELS) / factors[:, None]
    g.write(folder / f"{name}.onnx", g.add("Gemm", now, g.constant(weight), g.constant(np.zeros(10))), draw)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for make in (prenorm, separable):
        for kind in ("plain", "outliers"):
            make(folder, f"{make.__name__}_{kind}", outliers=kind == "outliers")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
