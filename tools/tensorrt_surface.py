"""TensorRT's Python API, read from NVIDIA's bindings.

The wheels of the bindings contain classes, enums and docstring signatures, but no engine. They are NVIDIA's property
and are downloaded, never committed; only the names that qdqspec uses are committed, by ``tools/tensorrt_api.py``. As a
program, this module prints the API of the ``tensorrt`` that it can import.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

Surface = dict[str, Any]


class MissingError(Exception):
    """The bindings are not available: no index, no wheel for this Python, or no C compiler."""


_ENTRY = re.compile(
    rb"\b(create\w+_INTERNAL|get\w*PluginRegistry|getNvOnnxParserVersion|getInferLibVersion|initLibNvInferPlugins)\b"
)
_LIBRARY = re.compile(rb"\b(lib(?:nvinfer|nvinfer_plugin|nvonnxparser)\.so\.\d+)\b")


def bindings(version: str, folder: Path) -> Path:
    """A folder from which the real bindings can be imported, without TensorRT; raises `MissingError`.

    The libraries that they are linked to are replaced by ones whose functions return null.
    """
    site = folder / "site"
    with zipfile.ZipFile(_wheel(version, folder)) as wheel:
        wheel.extractall(site)
    binary = next((site / "tensorrt_bindings").glob("tensorrt*.so")).read_bytes()
    libraries = {found.decode() for found in _LIBRARY.findall(binary)}
    functions = {found.decode() for found in _ENTRY.findall(binary)} | {"getInferLibVersion"}
    _make_libraries(site / "tensorrt_libs", libraries, functions)
    package = site / "tensorrt"
    package.mkdir()
    lines = "from tensorrt_bindings import *\nfrom tensorrt_bindings import __version__\n"
    (package / "__init__.py").write_text(lines)
    return site


def _wheel(version: str, folder: Path) -> Path:
    """Wheels for CUDA 13 exist from 10.13.2 on; for CUDA 12 before."""
    old = tuple(int(part) for part in version.split(".")) < (10, 13, 2)
    package = f"tensorrt-{'cu12' if old else 'cu13'}-bindings"
    words = ["-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d"]
    command = [sys.executable, *words, str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    found = list(folder.glob("tensorrt_*_bindings-*.whl"))
    if done.returncode or not found:
        why = done.stderr.strip()[-200:]
        raise MissingError(f"the bindings of TensorRT {version} cannot be downloaded: {why}")
    return found[0]


def _make_libraries(folder: Path, libraries: set[str], functions: set[str]) -> None:
    folder.mkdir()
    known = (os.environ.get("CC"), "cc", "gcc", "clang")
    compiler = next((name for name in known if name and shutil.which(name.split()[0])), None)
    if compiler is None:
        raise MissingError("there is no C compiler to make stand-ins for TensorRT's libraries")
    source = folder / "stand_in.c"
    source.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(functions)))
    for name in sorted(libraries):
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name), str(source)]
        subprocess.run([*shlex.split(compiler), *flags], check=True, capture_output=True)
    (folder / "__init__.py").write_text(
        "import ctypes, pathlib\n"
        f"for name in {sorted(libraries)!r}:\n"
        "    ctypes.CDLL(str(pathlib.Path(__file__).with_name(name)), mode=ctypes.RTLD_GLOBAL)\n",
        encoding="utf-8",
    )


def read_surface(site: Path) -> Surface:
    """The complete API of the bindings in a folder, read by a separate process."""
    command, environment = [sys.executable, __file__], {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: Surface = json.loads(done.stdout.splitlines()[-1])
    return found


def dump() -> Surface:
    """The API of the importable ``tensorrt``."""
    import tensorrt as trt

    classes, enums = Surface(), Surface()
    _walk(trt, "", classes, enums)
    functions = {n: _signatures(v) for n, v in vars(trt).items() if callable(v) and not isinstance(v, type)}
    return {"version": trt.__version__, "classes": classes, "enums": enums, "functions": functions}


def _walk(owner: Any, prefix: str, classes: Surface, enums: Surface) -> None:
    for name, value in vars(owner).items():
        if not isinstance(value, type) or name.startswith("_"):
            continue
        members = getattr(value, "__members__", None)
        if members is not None:
            enums[prefix + name] = {member: int(number) for member, number in members.items()}
        elif not prefix:
            classes[name] = _class(value)
            _walk(value, f"{name}.", classes, enums)


def _class(value: type) -> Surface:
    methods, properties = {}, {}
    for name, member in vars(value).items():
        if isinstance(member, property):
            properties[name] = {"settable": member.fset is not None}
        elif callable(member) and not isinstance(member, type) and re.match("__init__$|[^_]", name):
            methods[name] = _signatures(member)
    return {"methods": methods, "properties": properties}


_SIGNATURE = re.compile(r"^(?:\d+\. )?\w*\((?P<parameters>.*)\)(?: -> (?P<returns>.+))?$", re.MULTILINE)


def _signatures(function: Any) -> list[list[list[Any]]]:
    """The parameters (name, whether optional) of every overload, from the docstring."""
    found: list[list[list[Any]]] = []
    for line in (getattr(function, "__doc__", None) or "").splitlines():
        match = _SIGNATURE.match(line.strip())
        if match is None or "*args" in match["parameters"] or not ("self" in line or match["returns"]):
            continue
        texts = (text.partition(" = ") for text in _split(match["parameters"]))
        signature = [
            [head.partition(": ")[0], bool(default)] for head, _, default in texts if head[:4] != "self"
        ]
        found += [signature] if signature not in found else []
    return found


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    return [part for part in (*parts, text[start:].strip()) if part]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dump()) + "\n")
