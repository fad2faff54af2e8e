"""All readers of files, with valid files of each kind.

``READERS[name].read(data, folder)`` passes any bytes to a reader, which returns or raises `QdqspecError`; other
exceptions are bugs. ``mutated`` changes valid bytes. Used by the property tests and ``benchmarks/fuzz.py``.
"""

from __future__ import annotations

import functools
import io
import json
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from baseline_entries import entry_of

from qdqspec._core.config import load_settings
from qdqspec._core.registry import names
from qdqspec.accuracy.sources import read_members
from qdqspec.app.evidence.baselines import Conditions, read_baseline, update_baseline
from qdqspec.app.report.compare import compare_runs, comparison_text, comparison_to_json
from qdqspec.app.report.record import case_from_json, case_to_json, read_record, record_to_json
from qdqspec.app.report.write import format_named
from qdqspec.app.session.study import _read as read_study
from qdqspec.backends.tensorrt.layers import parse_layers, read_profile, read_times
from qdqspec.backends.trtexec.process import read_log
from qdqspec.checks.kinds.regression import judge_change
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.regions.expressions import parse
from qdqspec.qdq.calibrate import read_ranges
from qdqspec.qdq.region_schemes import PatternCache
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.search.journal import Journal
from qdqspec.spec.models import load_spec
from qdqspec.testing.backends import small_model
from qdqspec.testing.records import sample_run
from qdqspec.timing.stats import BuildTimes
from qdqspec.types import Consumer, PlacedPair, Placement, Samples, Site, Trial

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "tensorrt" / "samples"
HEADER = {"model_sha256": "ab12", "device": "a-cpu", "seed": 0}


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The function that reads a kind of file, and valid files of this kind."""

    read: Callable[[bytes, Path], object]
    seeds: Callable[[], Sequence[bytes]]


# ---- seeds ---------------------------------------------------------------------------------------


def _made(write: Callable[[Path], None], name: str) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        write(path)
        return [path.read_bytes()]


SITES = (
    Site(tensor="x", consumers=(Consumer("conv", 0),), format="uint8"),
    Site(tensor="w", consumers=(Consumer("conv", 1),), format="int8", axis=0, weight=True),
)
PAIRS = (
    PlacedPair(site=SITES[0], scale=(0.02,), zero_point=(128,)),
    PlacedPair(site=SITES[1], scale=(0.01, 0.02, 0.03, 0.04), zero_point=(0, 0, 0, 0)),
)
PLACEMENT = Placement(sites=frozenset(SITES))


def _journal(path: Path) -> None:
    trial = Trial(
        number=0, phase="pure", placement=PLACEMENT, samples=Samples(wall_ms=(1.5, 1.25)), ratio=0.9
    )
    with Journal.open(path, HEADER) as journal:
        journal.append(trial)
        journal.append(replace(trial, number=1))


def _baseline(path: Path) -> None:
    entry = entry_of(0.5, ((1.0, 1.1, 1.2), (1.05, 1.1, 1.0)), clock="cpu", model_sha256="ab")
    update_baseline(path, "a-cpu", {("default", "regression"): entry, ("other", "own"): entry})


def _written(*data: object) -> list[bytes]:
    return [json.dumps(one).encode() for one in data]


RANGES = b'{"x": 6.0, "t": [-1.5, 6.0], "w": [0, 2]}'
PATTERNS = b"""\
schema_version: 1
caches:
- backend: onnxruntime-cpu
  device: a-cpu
  patterns:
  - pattern: p1:abcdef
    text: Conv > Relu
    schemes:
    - {ratio: 0.6, interval: [0.5, 0.7], sites: 'in0.0=uint8 in0.1=w:int8/0 out1.0=uint8'}
    - {ratio: 0.9, sites: 'in0.0=uint8'}
"""
SETTINGS = b"""\
[tool.qdqspec]
backend = "fake"
threads = 2
time-limit = "20m"
require = ["device", "conclusive"]
report = ["a.html", "b.md"]
backend-option = ["tensorrt.opt-level=4"]
"""
STUDY = b"""\
{"schema_version": 1, "settings": {"backend": "fake", "threads": 1, "seed": 0}, "strategy": "attribution",
 "case": {"id": "default", "model": "/nowhere/a.onnx", "tune": {"trials": 5}, "inputs": {"profiles": []}}}
"""
EXPRESSIONS = (
    b"Conv > BatchNormalization? > (Relu|Clip)?",
    b"Conv[group=1] > (Transpose|Reshape)* > LayerNormalization",
    b"attention",
)


def _arrays() -> list[bytes]:
    found = []
    for save in (np.savez, np.savez_compressed):
        file = io.BytesIO()
        save(file, x=np.arange(24, dtype=np.float32).reshape(4, 2, 3), labels=np.arange(4))
        found.append(file.getvalue())
    return found


def _models() -> list[bytes]:
    outside = onnx.ModelProto()
    outside.CopyFrom(small_model())
    weight = outside.graph.initializer[0]
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.ClearField("raw_data")
    for key, value in (("location", "weights.bin"), ("offset", "0"), ("length", "432")):
        weight.external_data.add(key=key, value=value)
    branch = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (bool c, float[2] x) => (float[2] y) '
        "{ y = If (c) <then_branch = a () => (float[2] p) { p = Add(x, x) }, "
        "else_branch = b () => (float[2] q) { q = Mul(x, x) }> }"
    )
    protos = (small_model(), small_model(quantized=True), outside, branch)
    return [proto.SerializeToString() for proto in protos]


def _recorded(*patterns: str, most: int = 40_000) -> list[bytes]:
    files = [path for pattern in patterns for path in sorted(RECORDED.glob(pattern))]
    return [path.read_bytes() for path in files if path.stat().st_size <= most]


# ---- readers -------------------------------------------------------------------------------------


def _file(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def give(data: bytes, folder: Path) -> object:
        path = folder / name
        path.write_bytes(data)
        return read(path)

    return give


def _read_journal(path: Path) -> object:
    path.with_name("trials.header.json").unlink(missing_ok=True)
    with Journal.open(path, HEADER) as journal:
        return journal.trials()


@functools.cache
def _model() -> Model:
    return Model(small_model())


def _use_scheme(path: Path) -> object:
    return SchemeFile.read(path).apply(_model())


def _compare_baseline(path: Path) -> object:
    known = read_baseline(path)
    times = BuildTimes(tuned=((1.0, 1.1, 0.9),) * 3, reference=((1.0, 1.1, 0.9),) * 3)
    now = Conditions(clock="cpu", model_sha256="ab", rules={}, scheme="cd", environment={})
    for entry in (known.entry(name) for name in known.names()) if known else ():
        assert entry is not None
        entry.why_incomparable(now)
        entry.differences(now)
        before = BuildTimes(
            tuned=entry.samples["tuned"].on(entry.clock), reference=entry.samples["reference"].on(entry.clock)
        )
        judge_change(times.change_from(before), 0.05)
    return known


def _show_record(path: Path) -> object:
    """Read a record, and render it in every report format and in a comparison."""
    record = read_record(path)
    compared = compare_runs(record, sample_run())
    shown = [format_named(name).render(record) for name in names("format")]
    return shown, comparison_text(compared), json.dumps(comparison_to_json(compared, 0.05))


def _read_case(path: Path) -> object:
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        data = None
    return case_from_json(data)


def _read_arrays(path: Path) -> object:
    return [sum(row.size for row in member.rows()) for member in read_members(path).values()]


def _read_model(path: Path) -> object:
    path.with_name("weights.bin").write_bytes(bytes(432))
    model = load_model(path)
    _ = model.types, model.consumers, model.producer, model.subgraph_reads
    return [model.array(name) for name in model.constants]


def _text(read: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    return lambda data, folder: read(data.decode("utf-8", errors="replace"))


READERS: dict[str, Reader] = {
    "spec": Reader(
        read=_file("a.qdq.yaml", lambda path: load_spec(path, root=path.parent).cases()),
        seeds=lambda: [path.read_bytes() for path in sorted((ROOT / "specs").glob("*.qdq.yaml"))],
    ),
    "expression": Reader(read=_text(parse), seeds=lambda: EXPRESSIONS),
    "journal": Reader(
        read=_file("trials.jsonl", _read_journal), seeds=lambda: _made(_journal, "trials.jsonl")
    ),
    "scheme": Reader(
        read=_file("scheme.json", _use_scheme),
        seeds=lambda: _made(
            lambda path: SchemeFile(backend="onnxruntime-cpu", pairs=PAIRS).write(path), "s.json"
        ),
    ),
    "baseline": Reader(read=_file("b.json", _compare_baseline), seeds=lambda: _made(_baseline, "b.json")),
    "run record": Reader(
        read=_file("run.json", _show_record), seeds=lambda: _written(record_to_json(sample_run()))
    ),
    "result": Reader(
        read=_file("result.json", _read_case), seeds=lambda: _written(*map(case_to_json, sample_run().cases))
    ),
    "ranges": Reader(read=_file("ranges.json", read_ranges), seeds=lambda: (RANGES,)),
    "pattern cache": Reader(read=_file("patterns.yaml", PatternCache.read), seeds=lambda: (PATTERNS,)),
    "configuration": Reader(
        read=_file("pyproject.toml", lambda path: load_settings(path.parent, environ={})),
        seeds=lambda: (SETTINGS,),
    ),
    "study": Reader(read=_file("study.json", lambda path: read_study(path.parent)), seeds=lambda: (STUDY,)),
    "arrays": Reader(read=_file("data.npz", _read_arrays), seeds=_arrays),
    "model": Reader(read=_file("model.onnx", _read_model), seeds=_models),
    "layer information": Reader(
        read=_text(parse_layers), seeds=lambda: _recorded("*.graph.json", "*.layers.log")
    ),
    "layer profile": Reader(read=_text(read_profile), seeds=lambda: _recorded("*.profile.json")),
    "query times": Reader(read=_text(read_times), seeds=lambda: _recorded("*.times.json", most=400_000)),
    "trtexec log": Reader(read=_text(read_log), seeds=lambda: _recorded("*.log")),
}


# ---- mutations -----------------------------------------------------------------------------------

WORDS = tuple(
    b'{ } [ ] " : , null true NaN Infinity -1 0 1e999 99999999999999999999 \x00 \xff \n \\u0000 \\ud800 &a *a !!python '
    b"<<: - ~ ../../etc/passwd".split(b" ")
)


def mutated(seed: bytes, chance: random.Random) -> bytes:
    """The bytes with a few changes: flipped bits, removed and repeated parts, special words, nesting."""
    data = seed
    for _ in range(chance.choice((1, 1, 1, 2, 4, 12))):
        data = _changed(data, chance)
        if len(data) > 4 * len(seed) + 4096:
            break
    return data


KINDS = ["flip", "flip", "flip", "cut", "repeat", "word", "word", "move", "number", "number", "nest"]
NUMBERS = (b"0", b"-1", b"1e400", b"1e-400", b"9" * 30, b"0.5", b'"x"', b"null", b"[]", b"{}")


def _changed(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data) + 1)
    end = min(len(data), start + chance.choice((1, 2, 8, 64, 1024)))
    head, part, tail = data[:start], data[start:end], data[end:]
    match chance.choice(KINDS):
        case "flip":
            return (
                head + bytes([part[0] ^ 1 << chance.randrange(8)]) + data[start + 1 :]
                if part
                else data + b"\x01"
            )
        case "cut":
            return head if chance.random() < 0.3 else head + tail
        case "repeat":
            return head + part * chance.choice((2, 3, 50)) + tail
        case "word":
            return head + chance.choice(WORDS) + chance.choice((part, b"")) + tail
        case "move":
            place = chance.randrange(len(data) + 1)
            return data[:place] + part + data[place:]
        case "number":
            digits = [place for place, byte in enumerate(data[:20_000]) if 48 <= byte <= 57] or [0]
            place = chance.choice(digits)
            return data[:place] + chance.choice(NUMBERS) + data[place + 1 :]
        case _:
            opening = chance.choice((b"[", b'{"a":', b"(", b"- ", b"\n "))
            return head + opening * chance.choice((10, 300, 5000)) + data[start:]
