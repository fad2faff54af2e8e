"""Settings: their sources and refused values, folders of results, and names that backends declare."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
from hypothesis import given, strategies as st

from qdqspec._core import hooks, registry
from qdqspec._core.config import Settings, claim_folder, find_folder, find_root, list_settings, load_settings
from qdqspec._core.options import duration
from qdqspec.errors import ConfigError
from qdqspec.graph.model import Model
from qdqspec.qdq.survival import run_optimizer
from qdqspec.qdq.units import apply_rules
from qdqspec.spec import kinds
from qdqspec.testing.records import params_of
from qdqspec.types import Case


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_flags_precede_the_environment_which_precedes_the_file(tmp_path):
    root = project(tmp_path, "[tool.qdqspec]\nseed = 1\nthreads = 1\nbackend = 'fake'\n")
    settings = load_settings(
        root, flags={"seed": "3"}, environ={"QDQSPEC_SEED": "2", "QDQSPEC_THREADS": "2", "PATH": "/bin"}
    )
    assert (settings.seed, settings.threads, settings.backend) == (3, 2, "fake")
    origins = {name: origin for name, _, origin in list_settings(settings)}
    assert origins["seed"] == "--qdq-seed"
    assert origins["threads"] == "QDQSPEC_THREADS"
    assert origins["backend"] == "pyproject.toml [tool.qdqspec] backend"
    assert origins["mode"] == "default"


def test_relative_paths_start_at_the_file_or_the_current_folder(tmp_path):
    assert load_settings(tmp_path, environ={}) == Settings(root=tmp_path)
    root = project(tmp_path, '[tool.qdqspec]\ncache_dir = "kept"\nallow-path = ["a", "b"]\n')
    elsewhere = tmp_path / "elsewhere"
    below = root / "ml"  # the rootdir of pytest, for a pytest.ini there
    settings = load_settings(
        below, flags={"output": "out"}, environ={"QDQSPEC_JSON": "r.json"}, cwd=elsewhere
    )
    assert settings.root == below
    assert settings.cache_dir == root / "kept"
    assert settings.allow_path == (root / "a", root / "b")
    assert settings.output == elsewhere / "out"
    assert settings.json == elsewhere / "r.json"


@pytest.mark.parametrize(("word", "value"), [("1", True), ("true", True), ("no", False), ("", False)])
def test_switches_and_lists_in_the_environment_are_parsed(tmp_path, word, value):
    words = {"QDQSPEC_NO_CACHE": word, "QDQSPEC_REQUIRE": f"device{os.pathsep}conclusive"}
    settings = load_settings(tmp_path, environ=words)
    assert settings.no_cache is value
    assert settings.require == ("device", "conclusive")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.qdqspec]\nbackent = 'x'\n", "unknown key 'backent' (did you mean 'backend'?)"),
        ("[tool.qdqspec]\nthreads = 0\n", "threads: '0' does not fit: a whole number of at least 1"),
        ("[tool.qdqspec]\nno-cache = 3\n", "no-cache: '3' does not fit: on or off"),
        (
            "[tool.qdqspec]\nreport = ['~nobody.md']\n",
            "report: '~nobody.md' does not fit: there is no home folder",
        ),
        (
            "[tool.qdqspec]\nrequire = ['device', 'x']\n",
            "require: 'x' does not fit: one of device, conclusive",
        ),
        ("[tool]\nqdqspec = 3\n", "[tool.qdqspec] must be a table"),
        ("[tool.qdqspec\n", "this is not valid TOML"),
        pytest.param("a = " + "[" * 5000, "it nests too deep", id="deep"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError) as caught:
        load_settings(project(tmp_path, text), environ={})
    assert message in str(caught.value)
    assert "pyproject.toml" in str(caught.value)
    assert caught.value.cure


def test_the_root_is_the_nearest_folder_with_a_project(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").touch()
    assert find_root(tmp_path / "a" / "b") == tmp_path / "a"
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert find_root(tmp_path / "a" / "b") == tmp_path / "a" / "b", "there is no project"


@given(st.text(max_size=12) | st.from_regex(r"[0-9.smh ]{1,8}"))
def test_a_duration_is_time_with_units_or_refused(text):
    if re.fullmatch(r"\s*([0-9]+(\.[0-9]+)?[smh])+\s*", text):
        assert duration(f"{text.strip()}2h3m1s") == pytest.approx(duration(text) + 7381)
    else:
        with pytest.raises(ValueError, match="with its unit"):
            duration(text)


# ---- options of backends -------------------------------------------------------------------------
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_options_for_backends_are_collected_from_all_sources(tmp_path, backend):
    """A plugin library is an option of the chosen backend only."""
    root = project(tmp_path, "[tool.qdqspec]\nbackend-option = ['tensorrt.opt-level=4', 'fake.seed=3']\n")
    flags = {"backend": backend, "plugin": ["a.so", "b.so"], "trtexec_args": "--verbose"}
    settings = load_settings(root, flags=flags, environ={}, cwd=tmp_path)
    assert settings.extra == {
        "tensorrt.opt-level": "4",
        "fake.seed": "3",
        f"{backend}.plugins": f"{tmp_path / 'a.so'}{os.pathsep}{tmp_path / 'b.so'}",
        "trtexec.args": "--verbose",
    }
    assert load_settings(tmp_path.parent, environ={}).extra == {}


FILE = "pyproject.toml [tool.qdqspec] "


@pytest.mark.parametrize(
    ("toml", "environ", "origin"),
    [
        ("plugin = ['evil.so']", {}, FILE + "plugin"),
        ("backend-option = ['onnxruntime.plugins=evil.so']", {}, FILE + "backend-option"),
        ("", {"QDQSPEC_TRTEXEC_ARGS": "--dynamicPlugins=evil.so"}, "QDQSPEC_TRTEXEC_ARGS"),
        ("", {"QDQSPEC_BACKEND_OPTION": "trtexec.args=--dynamicPlugins=evil.so"}, "QDQSPEC_BACKEND_OPTION"),
    ],
)
def test_files_and_variables_cannot_load_native_code(tmp_path, toml, environ, origin):
    root = project(tmp_path, f"[tool.qdqspec]\n{toml}\n")
    with pytest.raises(ConfigError, match=r"command line (only|permits it)") as caught:
        load_settings(root, environ=environ, prefix="--")
    assert str(caught.value).startswith(origin)
    flag = "--plugin" if toml else "--trtexec-args"
    assert caught.value.cure == f"give {flag} on the command line"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("openvino_x.plugins=evil.so", "unknown backend 'openvino_x'"),
        ("onnxruntime.plugin=evil.so", "did you mean 'onnxruntime.plugins'?"),
        ("onnxruntime.level=all", "options of onnxruntime: optimization, plugins"),
        ("onnxruntime.providers=evil", "cannot be set: the CPU provider"),
        ("tensorrt.opt-level=9", "a whole number from 1 to 5 is expected"),
        ("trtexec.timing-cache=/etc/passwd", "accepted from the command line only"),
        *((word, "does not fit") for word in ("opt-level=4", "tensorrt.opt-level", "tensorrt.=1")),
    ],
)
def test_only_declared_backend_options_are_accepted(tmp_path, word, said):
    root = project(tmp_path, f"[tool.qdqspec]\nbackend-option = ['{word}']\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(root, environ={})
    assert said in str(caught.value)
    assert str(caught.value).startswith(FILE + "backend-option")


def test_the_command_line_can_load_native_code_into_backends_with_plugins(tmp_path):
    (tmp_path / "mine.so").touch()
    word = f"onnxruntime.plugins={tmp_path / 'mine.so'}"
    settings = load_settings(tmp_path, flags={"backend_option": [word]}, environ={})
    assert settings.extra == {"onnxruntime.plugins": str(tmp_path / "mine.so")}
    with pytest.raises(ConfigError, match="--qdq-plugin: backend fake loads no plugin libraries"):
        load_settings(tmp_path, flags={"backend": "fake", "plugin": ["a.so"]}, environ={})


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
    for layout, folder in (("spec/case", "net/default"), ("case", "default"), ("", ".")):
        found = find_folder(replace(settings, layout=layout), case("a/net.qdq.yaml"))
        assert found == settings.output / folder
    assert not settings.output.exists()
    assert names(settings, case("b/net.qdq.yaml")) == ["net/default"]
    assert find_folder(settings, case("a/net.qdq.yaml")) == settings.output / "net.a" / "default"
    shutil.rmtree(settings.output)
    settings.output.touch()  # writing the results reports it
    assert names(settings, case("a/net.qdq.yaml")) == ["net/default"]


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
def test_a_damaged_note_of_a_folder_is_replaced(note, tmp_path_factory) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "a").mkdir()
    (root / "a" / "net.qdq.yaml").touch()
    settings = Settings(root=root)
    (settings.output / "net").mkdir(parents=True)
    (settings.output / "net" / ".spec.json").write_bytes(note)
    found = Case(id="default", model=root / "net.onnx", spec=root / "a" / "net.qdq.yaml")
    assert names(settings, found) == ["net/default"] == names(settings, found)


def test_only_the_suffix_of_a_spec_is_not_part_of_its_name(case) -> None:
    """Baselines are in a folder of this name: ``net.qdq.yaml`` and ``net.py.qdq.yaml`` shared one."""
    specs = ["net.qdq.yaml", "net.yaml", "test_net.py", "net.py.qdq.yaml"]
    assert [case(spec).spec_name for spec in specs] == ["net", "net", "test_net", "net.py"]


PACKAGE = """
from qdqspec._core.hooks import Declaration

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


def test_names_of_an_installed_backend_are_valid_in_a_spec(install: None):
    assert hooks.declares("optimizers", "onnxruntime-basic")
    assert "qdq_mine_backend" not in sys.modules, "names of built-in backends import no other one"
    assert kinds._backend("qdq_mine-small") == "qdq_mine-small"
    assert params_of("lint", target="qdq_mine-1.2").target == ("qdq_mine-1.2",)
    assert params_of("survival", through=["qdq_mine-fast"]).through == ("qdq_mine-fast",)
    assert "qdq_mine-1" in hooks.all_names("lint_targets")
    # A backend that cannot be imported declares nothing, and is reported when the case runs.
    assert hooks.declaration_of("qdq_broken") == hooks.Declaration()
    assert kinds._backend("qdq_broken-any") == "qdq_broken-any"


def test_an_optimizer_and_a_placement_rule_of_an_installed_backend_run(install: None, tmp_path: Path):
    assert run_optimizer("qdq_mine-fast", tmp_path / "model.onnx", tmp_path) == tmp_path / "fast.onnx"
    model, units = Model(onnx.ModelProto()), (SimpleNamespace(forms=("a form",), nodes=("a node",)),)
    left = apply_rules(model, units, {"none": "qdq_mine_backend:no_units"})  # type: ignore[arg-type]
    assert left == ((), {"a node": "none"})
    with pytest.raises(ConfigError, match=r"hook 'qdq_mine_backend:nothing' .* cannot be imported") as caught:
        apply_rules(model, units, {"none": "qdq_mine_backend:nothing"})  # type: ignore[arg-type]
    assert "no attribute 'nothing'" in str(caught.value)
