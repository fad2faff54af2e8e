"""Folders of results: each spec has one, and the first spec of a name has the folder of that name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec._core.config import Settings, claim_folder, find_folder
from qdqspec.types import Case


@pytest.fixture
def case(tmp_path: Path) -> Callable[..., Case]:
    """The case of a spec (or of a bare model) at a path, which is created."""

    def make(spec: str | None, model: str = "net.onnx", case_id: str = "default") -> Case:
        file = None if spec is None else tmp_path / spec
        for path in (file, tmp_path / model):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
        return Case(id=case_id, model=tmp_path / model, spec=file)

    return make


def names(settings: Settings, *cases: Case) -> list[str]:
    return [claim_folder(settings, case).relative_to(settings.output).as_posix() for case in cases]


def test_later_specs_of_a_name_are_distinguished_by_their_folder(case, tmp_path: Path) -> None:
    settings = Settings(root=tmp_path)
    cases = [case(f"{at}net.qdq.yaml") for at in ("x/", "a/b/", "a-b/", "")] + [
        case("x/net.qdq.yaml", case_id="b8")
    ]
    found = ["net/default", "net.a-b/default", "net.a-b-2/default", "net.root/default", "net/b8"]
    assert names(settings, *cases) == found
    assert names(settings, *cases[::-1]) == found[::-1]


def test_finding_a_folder_creates_and_reserves_none(case, tmp_path: Path) -> None:
    settings = Settings(root=tmp_path)
    assert find_folder(settings, case("a/net.qdq.yaml")) == settings.output / "net" / "default"
    assert not settings.output.exists()
    assert names(settings, case("b/net.qdq.yaml")) == ["net/default"]
    assert find_folder(settings, case("a/net.qdq.yaml")) == settings.output / "net.a" / "default"


def test_a_model_and_its_spec_share_a_folder(case, tmp_path: Path) -> None:
    settings = Settings(root=tmp_path)
    bare, spec = case(None, "models/net.onnx"), case("specs/net.qdq.yaml", "models/net.onnx")
    other, far = case(None, "more/net.onnx"), case("far/net.qdq.yaml", "far/net.onnx")
    assert names(settings, bare, spec) == ["net/default"] * 2
    assert names(settings, other, far) == ["net.more/default", "net.far/default"]


def test_the_folder_of_a_deleted_spec_is_used_by_another_one(case, tmp_path: Path) -> None:
    settings = Settings(root=tmp_path)
    first, second = case("a/net.qdq.yaml"), case("b/net.qdq.yaml")
    assert names(settings, first) == ["net/default"]
    shutil.rmtree(tmp_path / "a")
    assert names(settings, second) == ["net/default"]
    case("a/net.qdq.yaml")
    assert names(settings, first) == ["net.a/default"]


def test_results_are_found_after_the_project_was_moved(case, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    specs = [case("old/a/net.qdq.yaml"), case("old/b/net.qdq.yaml")]
    assert names(Settings(root=old), *specs) == ["net/default", "net.b/default"]
    old.rename(new)
    moved = [case("new/b/net.qdq.yaml"), case("new/a/net.qdq.yaml")]
    assert names(Settings(root=new), *moved) == ["net.b/default", "net/default"]
    assert str(tmp_path) not in (new / "reports" / "net" / ".spec.json").read_text()


@given(note=st.binary(max_size=40) | st.sampled_from([b"[]", b'{"spec": 3}', b"{}", b"[" * 9999]))
def test_a_damaged_note_of_a_folder_is_replaced(
    note: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "a").mkdir()
    (root / "a" / "net.qdq.yaml").touch()
    settings = Settings(root=root)
    (settings.output / "net").mkdir(parents=True)
    (settings.output / "net" / ".spec.json").write_bytes(note)
    found = Case(id="default", model=root / "net.onnx", spec=root / "a" / "net.qdq.yaml")
    assert names(settings, found) == ["net/default"] == names(settings, found)


def test_finding_a_folder_does_not_fail_on_an_output_that_is_a_file(case, tmp_path: Path) -> None:
    (tmp_path / "reports").touch()
    assert names(Settings(root=tmp_path), case("a/net.qdq.yaml")) == ["net/default"]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("net.qdq.yaml", "net"),
        ("net.yaml", "net"),
        ("test_net.py", "test_net"),
        ("net.py.qdq.yaml", "net.py"),
    ],
)
def test_only_the_suffix_of_a_spec_is_not_part_of_its_name(case, spec: str, name: str) -> None:
    """Baselines are in a folder of this name: ``net.qdq.yaml`` and ``net.py.qdq.yaml`` shared one."""
    assert case(f"specs/{spec}").spec_name == name
