"""Runs verbs and placements on thousands of odd models: ``python benchmarks/odd_models.py [--tune N]``.

The models are those of ONNX: every operator test (`onnx.backend.test`, all operators and opsets), its converted and
real models that need no download of weights, and `tests/support/odd`. Each is processed by the verbs that need no
engine. Then placements are sampled, inserted, checked, loaded by ONNX Runtime if it loads the float model, and
stripped, which must restore the model. With ``--tune N`` every N-th model is tuned on the simulated device as well.

A result or a `QdqspecError` is correct. Faults are: other exceptions, a generated model that the checker or ONNX
Runtime rejects, and a model that is not restored. Exits with 1 if there are faults.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from tabulate import tabulate

from qdqspec._core.config import Settings
from qdqspec.app.cli import main as run_verb
from qdqspec.app.session import Session
from qdqspec.backends.base import Backend
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.backends.onnxruntime.engine import OnnxRuntime
from qdqspec.errors import QdqspecError
from qdqspec.graph.model import Model, load_model
from qdqspec.graph.storage import save_model
from qdqspec.qdq.import_qdq import import_placement
from qdqspec.qdq.insert import insert_qdq
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.qdq.strip import strip_qdq
from qdqspec.types import Placement

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

DRAWS = 4  # number of placements for each model and backend
TARGETS = ("tensorrt-10", "tensorrt-11", "onnxruntime-cpu")


def models() -> Iterator[tuple[str, onnx.ModelProto]]:
    """All models of the package onnx except those that download weights, and the odd models of the tests."""
    from odd import ODD_MODELS
    from onnx.backend.test.case.node import collect_testcases
    from onnx.backend.test.loader import load_model_tests

    yield from ((test.name, test.model) for test in collect_testcases(None))
    for kind in ("pytorch-converted", "pytorch-operator", "simple"):
        for test in load_model_tests(kind=kind):
            if test.model_dir and (file := Path(test.model_dir) / "model.onnx").is_file():
                yield f"{kind}/{test.name}", onnx.load(str(file))
    for file in sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("*.onnx")):
        yield file.stem, onnx.load(str(file))
    yield from ((f"odd/{odd.name}", odd.make()) for odd in ODD_MODELS)


class Tally:
    """The results of each step: counts, and faults by message."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: dict[str, list[str]] = defaultdict(list)

    def step(self, name: str, model: str, do: Callable[[], str]) -> None:
        """Run a step; ``do`` returns ``result``, ``clear error`` or the fault."""
        try:
            found = do()
        except QdqspecError:
            found = "clear error"
        except BaseException:  # noqa: BLE001 - any other exception is a fault
            found = "traceback: " + traceback.format_exc().strip().splitlines()[-1][:150]
        if found not in ("result", "clear error"):
            self.wrong[f"{name}: {found}"].append(model)
            found = found.partition(":")[0]
        self.counts[name][found] += 1

    def text(self) -> str:
        """A row for each step, and the faults."""
        kinds = list(dict.fromkeys(kind for counts in self.counts.values() for kind in counts))
        rows = [(name, *(counts[kind] for kind in kinds)) for name, counts in self.counts.items()]
        lines = [tabulate(rows, ("step", *kinds)), ""]
        lines += [f"{len(names)} {what}: {', '.join(names[:5])}" for what, names in self.wrong.items()]
        return "\n".join(lines if self.wrong else [*lines, "no fault"])


def verb(*words: object) -> str:
    """Run a verb in this process."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = run_verb([str(word) for word in words])
    if code != 2:
        return "result"
    return "clear error" if errors.getvalue().startswith("qdqspec: ") else "an error without a message"


def loads(model: Path) -> bool:
    """Whether ONNX Runtime loads the model unchanged."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - onnxruntime's exceptions share no public base class
        return False
    return True


def checks(model: Path) -> bool:
    """Whether the model passes the full checker."""
    try:
        onnx.checker.check_model(str(model), full_check=True)
    except Exception:  # noqa: BLE001 - shape inference raises other classes
        return False
    return True


def drawn(space: SchemeSpace, random: np.random.Generator) -> Iterator[Placement]:
    """Full quantization, then random parts of it."""
    yield space.resolve(space.everything())
    for _ in range(DRAWS - 1):
        yield space.resolve({unit.id: str(random.choice(unit.labels)) for unit in space.units})


def place(model: Model, path: Path, backend: Backend) -> str:
    """Insert random placements; the result must be as valid as the model, and strip must restore the model."""
    space = SchemeSpace(model, backend.capabilities())
    spans = {name: TensorRange(-8, 8) for name in model.types}
    numbers = Quantizer(model, spans, biases=space.bias_sources)
    sound, runs = checks(path), loads(path)
    quantized = any(node.op_type == "DequantizeLinear" for node in model.nodes)
    placed = path.with_name("placed.onnx")
    for placement in drawn(space, np.random.default_rng(0)):
        if not placement.sites:
            continue
        inserted = insert_qdq(model, placement, numbers)
        save_model(inserted.proto, placed, base=path.parent)
        if sound and not checks(placed):
            return "the checker rejects the inserted model"
        if runs and not loads(placed):
            return "ONNX Runtime rejects the inserted model"
        if quantized:  # pairs of the model are also removed and imported
            continue
        if strip_qdq(Model(inserted.proto), model).proto != model.proto:
            return "strip does not restore the model"
        if import_placement(load_model(placed), model).placement != placement:
            return "import returns another placement"
    return "result"


def folds(model: Path) -> str:
    """Fold constants; the result must be as valid as the model."""
    out = model.with_name("folded.onnx")
    found = verb("fold", model, "-o", out)
    if found == "result" and ((checks(model) and not checks(out)) or (loads(model) and not loads(out))):
        return "the folded model is rejected"
    return found


def examine(name: str, model: Path, tally: Tally, session: Session | None) -> None:
    """Run all steps on one model."""
    other = model.with_name("out.onnx")
    tally.step("inspect", name, lambda: verb("inspect", model, "--verbose", "--include-all"))
    tally.step("inspect --json", name, lambda: verb("inspect", model, "--json"))
    tally.step("lint", name, lambda: verb("lint", model, *(w for t in TARGETS for w in ("--target", t))))
    tally.step("fold", name, lambda: folds(model))
    tally.step("strip", name, lambda: verb("strip", model, "-o", other))
    tally.step("import", name, lambda: verb("import", model, "-o", model.with_name("scheme.json")))
    tally.step("diff", name, lambda: verb("diff", model, model))
    for backend in (OnnxRuntime(), FakeDevice()):
        tally.step(f"place for {backend.name}", name, lambda b=backend: place(load_model(model), model, b))
    if session is not None:
        tally.step("tune", name, lambda: tune(session, model))


def tune(session: Session, model: Path) -> str:
    """Tune with two builds."""
    session.tune(model, trials=2)
    return "result"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", type=int, metavar="N", help="Tune every N-th model, too.")
    every = parser.parse_args().tune
    tally, start = Tally(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of numpy about the data of operator tests
        found = list(models())
        warnings.simplefilter("error")
        settings = Settings(root=Path(folder), backend="fake", no_cache=True)
        with Session(settings) as session:
            for number, (name, proto) in enumerate(found):
                path = Path(folder) / f"model{number}.onnx"
                onnx.save(proto, path)
                examine(name, path, tally, session if every and number % every == 0 else None)
                path.unlink()
    print(f"{len(found)} models, {time.perf_counter() - start:.0f} s\n\n{tally.text()}")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
