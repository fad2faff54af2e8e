"""Names and hooks that backends declare: those of built-in backends, and those of an installed package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest
from pydantic import ValidationError

from qdqspec._core import registry
from qdqspec._core.config import hooks
from qdqspec.errors import ConfigError
from qdqspec.graph.model import Model
from qdqspec.qdq.read.survival import run_optimizer
from qdqspec.qdq.space.units import apply_rules
from qdqspec.spec import kinds

PACKAGE = """
from qdqspec._core.config.hooks import Declaration

declaration = Declaration(
    targets=("qdq_mine", "qdq_mine-small"),
    lint_targets=("qdq_mine-1", "qdq_mine-1.2"),
    optimizers={"qdq_mine-fast": "qdq_mine_backend:optimize"},
)

def no_units(model, units):
    return ()

def optimize(model, folder):
    return folder / "fast.onnx"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with a backend ``qdq_mine``, and one that cannot be imported."""
    (tmp_path / "qdq_mine_backend.py").write_text(PACKAGE)
    (tmp_path / "qdq_mine_broken.py").write_text("import qdq_no_such_module")
    folder = tmp_path / "qdq_mine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: qdq-mine\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[qdqspec.backends]\nqdq_mine = qdq_mine_backend:backend\nqdq_broken = qdq_mine_broken:backend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()
    for name in ("qdq_mine_backend", "qdq_mine_broken"):
        sys.modules.pop(name, None)


def params(kind: str, **words: object):
    return kinds.params_of(kind)(kind=kind, **words)


def test_each_name_is_mapped_to_the_backend_that_declares_it():
    for backend in registry.names("backend"):
        declared = hooks.declaration_of(backend)
        for name in (*declared.targets, *declared.lint_targets, *declared.optimizers):
            assert hooks.owner_of(name) == backend


def test_names_of_an_installed_backend_are_valid_in_a_spec(install: None):
    assert kinds._backend("qdq_mine-small") == "qdq_mine-small"
    assert params("lint", target="qdq_mine-1.2").target == ("qdq_mine-1.2",)
    assert params("survival", through=["qdq_mine-fast"]).through == ("qdq_mine-fast",)
    assert "qdq_mine-1" in hooks.all_names("lint_targets")


def test_names_that_no_installed_backend_declares_are_not_valid():
    with pytest.raises(ValidationError, match=r"unknown lint target 'qdq_mine-1\.2'"):
        params("lint", target="qdq_mine-1.2")
    with pytest.raises(ValidationError, match="unknown optimizer 'qdq_mine-fast'"):
        params("survival", through=["qdq_mine-fast"])


def test_names_of_built_in_backends_import_no_installed_backend(install: None):
    assert hooks.declares("optimizers", "onnxruntime-basic")
    assert "qdq_mine_backend" not in sys.modules


def test_an_optimizer_of_an_installed_backend_runs(install: None, tmp_path: Path):
    assert run_optimizer("qdq_mine-fast", tmp_path / "model.onnx", tmp_path) == tmp_path / "fast.onnx"


def test_a_placement_rule_of_an_installed_backend_is_applied(install: None):
    model, units = Model(onnx.ModelProto()), (object(),)
    stages = apply_rules(model, units, {"none": "qdq_mine_backend:no_units"})  # type: ignore[arg-type]
    assert stages == {"": units, "none": ()}
    with pytest.raises(ConfigError, match=r"hook 'qdq_mine_backend:nothing' .* cannot be imported") as caught:
        apply_rules(model, units, {"none": "qdq_mine_backend:nothing"})  # type: ignore[arg-type]
    assert "no attribute 'nothing'" in str(caught.value)


def test_a_backend_that_cannot_be_imported_declares_nothing(install: None):
    assert hooks.declaration_of("qdq_broken") == hooks.Declaration()
    assert kinds._backend("qdq_broken-any") == "qdq_broken-any"  # reported when the case runs
