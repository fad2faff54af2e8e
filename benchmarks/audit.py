"""Checks the properties of regions and placements on models: ``python benchmarks/audit.py MODEL.onnx ...``.

One row for each model, with these checks:

- ``parts``: the leaves are a partition, by structure, by names and by the kernels of ONNX Runtime;
- ``same``: regions are the same if the file is read again, and ids, types and patterns if names and order of nodes
  are changed;
- ``loads``: sampled placements, including full quantization, pass the full checker and load in ONNX Runtime;
- ``strips``: strip restores the model bit for bit, with the model as reference, and without one for float weights;
- ``comes back``: placements are recovered by import, from the schemes of their patterns, and from the text of these;
- ``survives``: constant folding and ONNX Runtime at each level keep all pairs of full quantization, or of the model;
- ``again``: import, strip and apply of a model with Q/DQ reproduce its outputs.

A model with Q/DQ is stripped before placements are sampled. A dash means that a check does not apply. Other texts are
the first failure of the check, and the command exits with 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from tabulate import tabulate

from qdqspec.app.session import Session
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import QdqspecError
from qdqspec.graph.fold import fold_weights
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.protos import CONTRIBUTED, opset_of
from qdqspec.graph.regions.search import find_regions
from qdqspec.graph.storage import save_model
from qdqspec.qdq.formats import BIAS_FORMAT
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import insert_qdq, raised
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import tie_ranges
from qdqspec.qdq.region_schemes import Frames, parse_scheme, placement_of, schemes_of
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.strip import strip_qdq
from qdqspec.qdq.survival import check_survival
from qdqspec.types import (
    Case,
    Inputs,
    InputShape,
    Optimizer,
    Placement,
    Region,
    RegionRules,
    ShapeProfile,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

THROUGH: tuple[Optimizer, ...] = (
    "constant-folding", "onnxruntime-basic", "onnxruntime-extended", "onnxruntime-all", "onnxslim", "onnxscript",
)  # fmt: skip
OK, NOTHING = "ok", "-"


class Audit:
    """One model with sampled placements."""

    def __init__(self, path: Path, folder: Path, samples: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.path, self.folder, self.samples, self.shapes = path, folder, samples, shapes
        self.given = load_model(path)
        self.is_quantized = any(node.op_type == "DequantizeLinear" for node in self.given.nodes)
        floating = Model(strip_qdq(self.given).proto, path=path) if self.is_quantized else self.given
        self.model = fold_weights(floating).model  # as in a search
        self.regions = find_regions(self.model)
        self.space = SchemeSpace(self.model, OnnxRuntime().capabilities(), regions=self.regions)
        from random_models import ranges_for

        ranges = tie_ranges(self.model, ranges_for(self.model))
        self.numbers = Quantizer(self.model, ranges, biases=self.space.bias_sources)

    @cached_property
    def placements(self) -> list[Placement]:
        lots = random.Random(0)
        drawn = [
            {unit.id: lots.choice(unit.labels) for unit in self.space.units} for _ in range(self.samples)
        ]
        found = [self.space.resolve(labels) for labels in (self.space.everything(), *drawn)]
        return [placement for placement in found if placement.sites]

    def parts(self) -> str:
        for by in ("structure", "names", "fusion"):
            case = Case(id="default", model=self.path, regions=RegionRules(by=by), inputs=self._inputs())
            with closing(Session(root=self.folder)) as session:
                regions = session.regions(case)
            if not _is_partition(regions):
                return f"no partition by {by}"
        everything = [
            node.name for node in self.model.nodes if node.op_type != "Constant" and not node.is_marker
        ]
        leaves = [name for region in self.regions if region.type == "LEAF" for name in region.nodes]
        return OK if sorted(leaves) == sorted(everything) else "nodes without a leaf"

    def same(self) -> str:
        from changed_models import renamed_and_reordered

        regions = find_regions(self.given)
        if find_regions(load_model(self.path)) != regions:
            return "other regions when read again"
        for seed in range(3):
            other = Model(renamed_and_reordered(self.given.proto, random.Random(seed)), path=self.path)
            if _properties(find_regions(other)) != _properties(regions):
                return "other regions under other names"
        return OK

    def loads(self) -> str:
        for number, placement in enumerate(self.placements):
            try:
                path = self._save(placement, "sample.onnx")
                # the checker has no types of results of contributed operators
                known = all(node.domain != CONTRIBUTED for node in load_model(path).nodes)
                onnx.checker.check_model(path, full_check=known)
                _session(self.folder / "sample.onnx")
            except Exception as error:  # noqa: BLE001 - the row reports any error
                return f"sample {number}: {str(error).strip().splitlines()[-1][:80]}"
        return f"{len(self.placements)} ok" if self.placements else NOTHING

    def strips(self) -> str:
        whole = _bytes(self.model.proto)
        for number, placement in enumerate(self.placements):
            stored = insert_qdq(self.model, placement, self.numbers).proto
            if _bytes(strip_qdq(Model(stored, path=self.path), self.model).proto) != whole:
                return f"sample {number}: not the model, with its reference"
            kept = Placement(sites=frozenset(s for s in placement.sites if s.format != BIAS_FORMAT))
            floating = insert_qdq(self.model, kept, self.numbers, floating=kept.sites).proto
            before = _bytes(raised(self.model.proto, opset_of(floating)))  # it stays raised
            alone = strip_qdq(Model(floating, path=self.path)).proto
            if _bytes(alone) not in (whole, before):
                return f"sample {number}: not the model"
        return OK if self.placements else NOTHING

    def comes_back(self) -> str:
        frames = Frames(self.model, self.regions)
        for number, placement in enumerate(self.placements):
            schemes = schemes_of(frames, placement)
            read = {region: parse_scheme(str(scheme)) for region, scheme in schemes.items()}
            if placement_of(frames, read).digest != placement.digest:
                return f"sample {number}: other schemes"
            inserted = insert_qdq(self.model, placement, self.numbers).proto
            imported = import_placement(Model(inserted, path=self.path), self.model).placement
            if imported.digest != placement.digest:
                return f"sample {number}: another placement imported"
        return OK if self.placements else NOTHING

    def survives(self) -> str:
        path = self.path
        if not self.is_quantized:
            if not self.placements:
                return NOTHING
            self._save(self.placements[0], "everything.onnx")
            path = self.folder / "everything.onnx"
        losses = []
        for found in check_survival(path, THROUGH):
            if found.error and "is not installed" not in found.error:
                return f"{found.optimizer}: {found.error[:60]}"
            if found.lost:
                losses.append(f"{found.optimizer} loses {len(found.lost)} of {found.pairs}: {found.lost[0]}")
        return "; ".join(losses) or OK

    def again(self) -> str:
        if not self.is_quantized:
            return NOTHING
        imported = import_placement(self.given)
        imported.write(self.folder / "scheme.json")
        stripped = Model(strip_qdq(self.given).proto, path=self.path)
        applied = SchemeFile.read(self.folder / "scheme.json").apply(stripped)
        save_model(applied.proto, self.folder / "again.onnx", base=self.path.parent)
        level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        ours, theirs = (_session(path, level) for path in (self.folder / "again.onnx", self.path))
        for seed in range(8):
            feeds = _feeds(theirs, np.random.default_rng(seed))
            for mine, its in zip(ours.run(None, feeds), theirs.run(None, feeds), strict=True):
                if not np.array_equal(mine, its):
                    return f"other results, by {np.max(np.abs(mine - its)):.3g}"
        return f"{len(imported.pairs)} pairs ok"

    def _inputs(self) -> Inputs:
        """The shapes for builds: those given for dynamic inputs, and 1 for dynamic dimensions of others."""
        known = {name: self.given.shape(name) or () for name in self.given.inputs}
        given = {name: shape for name, shape in self.shapes.items() if None in known.get(name, ())}
        dims = {name: given.get(name, tuple(max(d or 1, 1) for d in shape)) for name, shape in known.items()}
        shapes = {name: InputShape(min=own, opt=own, max=own) for name, own in dims.items()}
        return Inputs(profiles=(ShapeProfile(shapes=shapes),))

    def _save(self, placement: Placement, name: str) -> str:
        inserted = insert_qdq(self.model, placement, self.numbers)
        save_model(inserted.proto, self.folder / name, base=self.path.parent)
        return str(self.folder / name)


def _is_partition(regions: tuple[Region, ...]) -> bool:
    leaves = [name for region in regions if region.type == "LEAF" for name in region.nodes]
    return sorted(leaves) == sorted(regions[0].nodes) if regions else True


def _properties(regions: tuple[Region, ...]) -> list[tuple[object, ...]]:
    return [(r.id, r.type, r.children, len(r.nodes), r.pattern) for r in regions]


def _bytes(proto: onnx.ModelProto) -> bytes:
    return bytes(proto.SerializeToString(deterministic=True))


def _session(
    path: Path,
    level: onnxruntime.GraphOptimizationLevel = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _feeds(session: onnxruntime.InferenceSession, chance: np.random.Generator) -> dict[str, np.ndarray]:
    shapes = {i.name: [d if isinstance(d, int) else 1 for d in i.shape] for i in session.get_inputs()}
    return {name: chance.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


STEPS = ("parts", "same", "loads", "strips", "comes_back", "survives", "again")


def row(path: Path, samples: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """The result of each step for a model."""
    with tempfile.TemporaryDirectory() as folder:
        audit = Audit(path, Path(folder), samples, shapes)
        leaves = sum(region.type == "LEAF" for region in audit.regions)
        patterns = len({region.pattern for region in audit.regions if region.type == "LEAF"})
        yield from map(str, (path.stem, len(audit.model.nodes), leaves, patterns, len(audit.space.units)))
        for step in STEPS:
            yield _result(getattr(audit, step))


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, dims = text.partition("=")
    return name, tuple(int(dim) for dim in dims.split(","))


def _result(step: Callable[[], str]) -> str:
    try:
        return step()
    except QdqspecError as error:
        return f"error: {str(error).splitlines()[0][:80]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.onnx")
    parser.add_argument("--samples", type=int, default=5, help="placements drawn for each model (5)")
    parser.add_argument(
        "--shape",
        type=_shape,
        action="append",
        default=[],
        metavar="INPUT=1,576",
        help="shape of a dynamic input",
    )
    arguments = parser.parse_args()
    rows = []
    for path in arguments.models:
        rows.append(list(row(path, arguments.samples, dict(arguments.shape))))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    headers = ("model", "nodes", "leaves", "patterns", "units", *(step.replace("_", " ") for step in STEPS))
    print(tabulate(rows, headers, disable_numparse=True))
    fine = (OK, NOTHING)
    return int(any(not cell.endswith("ok") and cell not in fine for one in rows for cell in one[5:]))


if __name__ == "__main__":
    sys.exit(main())
