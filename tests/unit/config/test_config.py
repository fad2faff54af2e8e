"""The source of each setting, and which values are refused."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qdqspec._core.config import (
    Settings,
    find_folder,
    find_root,
    list_settings,
    load_settings,
)
from qdqspec._core.config.declared import duration
from qdqspec.errors import ConfigError
from qdqspec.types import Case


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_default_folders_are_below_the_root(tmp_path):
    settings = load_settings(tmp_path, environ={})
    assert settings.cache_dir == tmp_path / ".qdqspec" / "cache"
    assert settings.output == tmp_path / "reports"
    assert settings == Settings(root=tmp_path)
    assert {setting.origin for setting in list_settings(settings)} == {"default"}


def test_flags_precede_the_environment_which_precedes_the_file(tmp_path):
    root = project(tmp_path, "[tool.qdqspec]\nseed = 1\nthreads = 1\nbackend = 'fake'\n")
    settings = load_settings(
        root, flags={"seed": "3"}, environ={"QDQSPEC_SEED": "2", "QDQSPEC_THREADS": "2", "PATH": "/bin"}
    )
    assert (settings.seed, settings.threads, settings.backend) == (3, 2, "fake")
    origins = {setting.name: setting.origin for setting in list_settings(settings)}
    assert origins["seed"] == "--qdq-seed"
    assert origins["threads"] == "QDQSPEC_THREADS"
    assert origins["backend"] == "pyproject.toml [tool.qdqspec] backend"
    assert origins["mode"] == "default"


def test_relative_paths_start_at_the_file_or_the_current_folder(tmp_path):
    root = project(tmp_path, '[tool.qdqspec]\ncache_dir = "kept"\nallow-path = ["a", "b"]\n')
    elsewhere = tmp_path / "elsewhere"
    settings = load_settings(root, flags={"output": "out"}, environ={"QDQSPEC_JSON": "r.json"}, cwd=elsewhere)
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
        ("[tool.qdqspec]\nno-cache = 3\n", "no-cache: '3' does not fit: true or false"),
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


def test_the_folder_of_a_case_has_the_layout_of_the_settings(tmp_path):
    case = Case(id="int8-b8", model=Path("m.onnx"), spec=Path("specs/a.qdq.yaml"))
    out = tmp_path / "reports"
    assert find_folder(Settings(root=tmp_path), case) == out / "a" / "int8-b8"
    assert find_folder(Settings(root=tmp_path, layout="case"), case) == out / "int8-b8"
    assert find_folder(Settings(root=tmp_path, layout=""), case) == out
    assert not out.exists()


def test_the_root_is_the_nearest_folder_with_a_project(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").touch()
    assert find_root(tmp_path / "a" / "b") == tmp_path / "a"
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert find_root(tmp_path / "a" / "b") == tmp_path / "a" / "b", "there is no project"


@given(hours=st.integers(0, 99), minutes=st.integers(0, 999), seconds=st.integers(0, 9999))
def test_units_of_a_duration_are_added(hours, minutes, seconds):
    assert duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@given(st.text(max_size=12) | st.from_regex(r"[0-9.smh ]{1,8}"))
def test_a_duration_is_time_with_units_or_refused(text):
    if re.fullmatch(r"\s*([0-9]+(\.[0-9]+)?[smh])+\s*", text):
        assert duration(text) >= 0
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
    assert load_settings(tmp_path / "elsewhere", environ={}).extra == {}


@pytest.mark.parametrize(
    ("toml", "environ", "origin"),
    [
        ("plugin = ['evil.so']", {}, "pyproject.toml [tool.qdqspec] plugin"),
        ("", {"QDQSPEC_TRTEXEC_ARGS": "--dynamicPlugins=evil.so"}, "QDQSPEC_TRTEXEC_ARGS"),
        (
            "backend-option = ['onnxruntime.plugins=evil.so']",
            {},
            "pyproject.toml [tool.qdqspec] backend-option",
        ),
        ("", {"QDQSPEC_BACKEND_OPTION": "trtexec.args=--dynamicPlugins=evil.so"}, "QDQSPEC_BACKEND_OPTION"),
    ],
)
def test_files_and_variables_cannot_load_native_code(tmp_path, toml, environ, origin):
    root = project(tmp_path, f"[tool.qdqspec]\n{toml}\n")
    with pytest.raises(ConfigError, match=r"command line (only|permits it)") as caught:
        load_settings(root, environ=environ)
    assert str(caught.value).startswith(origin)
    assert "on the command line" in caught.value.cure


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
    assert str(caught.value).startswith("pyproject.toml [tool.qdqspec] backend-option")
    assert caught.value.cure


@pytest.mark.parametrize("line", ["plugin = ['a.so']", "backend-option = ['onnxruntime.plugins=a.so']"])
def test_the_cure_has_the_option_of_the_command_that_was_used(tmp_path, line):
    with pytest.raises(ConfigError) as caught:
        load_settings(project(tmp_path, f"[tool.qdqspec]\n{line}\n"), environ={}, prefix="--")
    assert caught.value.cure == "give --plugin on the command line"


def test_the_command_line_can_load_native_code(tmp_path):
    (tmp_path / "mine.so").touch()
    word = f"onnxruntime.plugins={tmp_path / 'mine.so'}"
    settings = load_settings(tmp_path, flags={"backend_option": [word]}, environ={})
    assert settings.extra == {"onnxruntime.plugins": str(tmp_path / "mine.so")}


def test_plugins_are_refused_for_a_backend_without_plugins(tmp_path):
    with pytest.raises(ConfigError, match="--qdq-plugin: backend fake loads no plugin libraries"):
        load_settings(tmp_path, flags={"backend": "fake", "plugin": ["a.so"]}, environ={})
