"""Every verb on every odd model has a result or raises one error without a traceback.

The models and their expected results are in `tests/support/odd`. Tuning runs on the simulated device, which computes
real outputs, and for some models on ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from odd import ODD_MODELS, OddModel
from onnx_text import outputs_of
from packaging.version import Version

from qdqspec._core.config import Settings
from qdqspec.accuracy.case_data import CaseData
from qdqspec.app.session import Session
from qdqspec.app.session.result import Result
from qdqspec.backends.fake.engine import FakeDevice
from qdqspec.errors import QdqspecError
from qdqspec.graph.given import given_model
from qdqspec.graph.model import load_model
from qdqspec.qdq.quantizer import Quantizer
from qdqspec.qdq.ranges import TensorRange
from qdqspec.qdq.scheme_file import SchemeFile
from qdqspec.qdq.search_space import SchemeSpace
from qdqspec.types import Inputs

_SOME_OPSETS = ("opset-7", "opset-13", "opset-25")  # `benchmarks/odd_models.py` runs all
MODELS = [odd for odd in ODD_MODELS if not odd.name.startswith("opset-") or odd.name in _SOME_OPSETS]
READABLE = [odd for odd in MODELS if odd.name != "no-nodes"]
# Models that ONNX Runtime computes, but not the reference implementation of the simulated device.
NOT_SIMULATED = {"sparse-weight"}
if Version(onnx.__version__) < Version("1.22"):
    NOT_SIMULATED |= {"scan"}  # onnx's own evaluator passes no outer values into the body of Scan
NOT_TUNED = {f"names-{kind}" for kind in ("colons", "slashes", "spaces", "globs", "endings", "length")}
NOTHING_SIMULATED = {"only-copies"}  # it has no integer kernels for these
NOTHING_PLACED = {"only-copies", "double", "q-operators", "string-input", "unnamed-dimensions"}
# Models that the reference implementation computes, but not ONNX Runtime.
NOT_ON_ORT = {"bfloat16": "ONNX Runtime has no kernel", "names-repeated": "two nodes with same node name"}


def of(models: list[OddModel]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("odd", models, ids=lambda odd: odd.name)


@pytest.fixture
def net(odd: OddModel, tmp_path: Path) -> Path:
    onnx.save(odd.make(), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session("fake", tmp_path_factory.mktemp("fake")) as opened:
        yield opened


@pytest.fixture(scope="module")
def onnx_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    with session("onnxruntime", tmp_path_factory.mktemp("ort")) as opened:
        yield opened


def session(backend: str, folder: Path) -> Session:
    return Session(Settings(root=folder, backend=backend, no_cache=True, output=folder / "reports"))


# ---- tune -----------------------------------------------------------------------------------------


def tuned(session: Session, model: Path) -> Result | None:
    """The result, or ``None`` if the error names the file."""
    try:
        return session.tune(model, trials=2)
    except QdqspecError as error:
        message = str(error)
    assert str(model) in message
    assert "Traceback" not in message
    return None


@of([odd for odd in MODELS if odd.name not in NOT_TUNED])
@pytest.mark.usefixtures("engine_threads")
def test_tune_on_the_simulated_device(odd: OddModel, net: Path, simulated: Session) -> None:
    found = tuned(simulated, net)
    if odd.name in NOT_SIMULATED:
        assert found is None
        return
    assert (found is None) == (odd.outcome == "refused")
    if found is not None:
        is_nothing = found.reason.startswith("nothing in it can be quantized")
        assert is_nothing == (odd.outcome == "nothing" or odd.name in NOTHING_SIMULATED)
        assert found.search.built == (1 if is_nothing else 2)
        assert found.unchanged == (not found.scheme.sites)


TUNED_FOR_REAL = (
    "names-quotes", "names-repeated", "loop", "local-function", "custom-operator", "float16", "bfloat16", "double",
    "zero-size", "sparse-weight", "infinite-mask", "opset-7", "opset-25", "output-twice", "pairs-already",
)  # fmt: skip


@of([odd for odd in MODELS if odd.name in TUNED_FOR_REAL])
def test_tune_on_onnx_runtime(odd: OddModel, net: Path, onnx_runtime: Session) -> None:
    found = tuned(onnx_runtime, net)
    assert (found is None) == (odd.outcome == "refused" or odd.name in NOT_ON_ORT)
    if found is not None:
        assert found.reason.startswith("nothing in it can be quantized") == (odd.outcome == "nothing")


@of([odd for odd in MODELS if odd.outcome == "refused"])
def test_tuning_a_refused_model_is_an_error_with_the_reason(odd: OddModel, net: Path, verb) -> None:
    result = verb("tune", "net.onnx", "--backend", "fake", "-o", "out", "--no-cache")
    assert result.code == 2
    assert "net.onnx" in result.err
    assert odd.error_text in result.err


# ---- verbs about one model ------------------------------------------------------------------------


@of(MODELS)
def test_inspect_and_lint_on_odd_models(odd: OddModel, net: Path, verb) -> None:
    refused = odd.name == "no-nodes"
    for words in (["--json"], ["--verbose", "--include-all"], ["--backend", "fake", "--max-nodes", "2"]):
        assert verb("inspect", "net.onnx", *words).code == (2 if refused else 0)
    targets = ("tensorrt-10", "tensorrt-11", "onnxruntime-cpu", "openvino-cpu")
    looked = verb("lint", "net.onnx", *(word for target in targets for word in ("--target", target)))
    assert looked.code in ((2,) if refused else (0, 1))


@of(READABLE)
def test_fold_and_strip_do_not_change_outputs(odd: OddModel, net: Path, verb) -> None:
    before = net.read_bytes()
    for name in ("fold", "strip"):
        assert verb(name, "net.onnx", "-o", f"{name}.onnx").code == 0
        if odd.name != "pairs-already" or name == "fold":
            assert_same_outputs(net, net.with_name(f"{name}.onnx"))
    assert net.read_bytes() == before
    assert verb("diff", "net.onnx", "net.onnx").code == 0
    assert verb("diff", "net.onnx", "strip.onnx").code == (odd.name == "pairs-already")
    assert verb("import", "net.onnx", "-o", "scheme.json").code == (0 if odd.name == "pairs-already" else 2)


@of(READABLE)
def test_an_applied_scheme_can_be_imported_and_stripped(odd: OddModel, net: Path, verb) -> None:
    model = load_model(net)
    space = SchemeSpace(model, FakeDevice().capabilities())
    placement = space.resolve(space.everything())
    if not placement.sites:
        assert odd.name in NOTHING_PLACED
        return
    numbers = Quantizer(model, {name: TensorRange(-4, 4) for name in model.types}, biases=space.bias_sources)
    SchemeFile(backend="fake", pairs=numbers.placed(placement)).write(net.with_name("scheme.json"))
    assert verb("apply", "net.onnx", "scheme.json", "-o", "placed.onnx").code == 0
    placed = load_model(net.with_name("placed.onnx"))
    assert (placed.inputs, placed.outputs) == (model.inputs, model.outputs)
    assert (outputs(placed.path) is None) == (outputs(net) is None)
    assert verb("diff", "net.onnx", "placed.onnx").code == 1
    assert verb("import", "placed.onnx", "-o", "again.json", "--reference", "net.onnx").code == 0
    assert verb("strip", "placed.onnx", "-o", "back.onnx", "--reference", "net.onnx").code == 0
    if odd.name != "pairs-already":
        tuned = given_model(net, {}).proto  # the model with inlined functions
        assert net.with_name("back.onnx").read_bytes() == tuned.SerializeToString(deterministic=True)
        assert verb("apply", "net.onnx", "again.json", "-o", "placed-again.onnx").code == 0
        assert verb("diff", "placed.onnx", "placed-again.onnx").code == 0


def outputs(model: Path, other: Path | None = None) -> list[object] | None:
    """Outputs of a model for random inputs (of the other one), or ``None`` if ONNX Runtime does not run it."""
    given = load_model(other or model)
    try:
        feeds = CaseData(given, Inputs()).sample
    except QdqspecError:
        return None
    try:
        return outputs_of(model, feeds)
    except Exception:  # noqa: BLE001 - onnxruntime's exceptions share no public base class
        return None


def assert_same_outputs(one: Path, other: Path) -> None:
    before, after = outputs(one), outputs(other, one)
    assert (before is None) == (after is None)
    for left, right in zip(before or (), after or (), strict=True):
        if isinstance(left, np.ndarray) and left.dtype.kind == "f":
            np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_equal(left, right)
