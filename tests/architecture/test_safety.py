"""Forbidden operations, checked in the source: executing the content of a file, and writing a file in place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "qdqspec"
FILES = sorted(PACKAGE.rglob("*.py"))

# These modules execute read data or send requests.
NEVER_IMPORTED = re.compile(
    r"(_?pickle|cPickle|marshal|shelve|dill|cloudpickle|joblib|copyreg|runpy"
    r"|urllib\.request|http|requests|ftplib|smtplib|xmlrpc|telnetlib|webbrowser)(\..*)?"
)
NEVER_CALLED = re.compile(
    r"eval|exec|compile|__import__|os\.(system|popen)|(np|numpy|torch)\.load|yaml\.(unsafe_)?load"
    r"|np\.fromregex|pd\.read_pickle"
)
TALKS_TO_CHILDREN = {
    "backends/onnxruntime_web/node.py",
    "backends/isolation/launch.py",
    "_core/wire.py",
    "backends/isolation/worker.py",
}  # over private sockets

# Modules that may write a file in place, each with the reason why an interruption causes no damage.
WRITES_IN_PLACE = {
    "backends/onnxruntime_web/install.py": "npm reads both files; the next run of the command writes them again",
    "_core/files.py": "it implements atomic writing",
    "app/report/write.py": "it appends to the summary of a job, which other steps write to",
    "graph/save.py": "into a hidden folder created by files.py",
    "graph/weights.py": "append only, in a folder created by files.py or temporary.py",
    "timing/environment.py": "in a folder created by temporary.py",
    "timing/store.py": "into a hidden folder created by files.py",
    "app/preparation/cached.py": "into a hidden folder of the cache",
    "app/preparation/files.py": "into a folder that is moved out as a whole, see staging.py",
    "search/journal.py": "line by line; an incomplete line is recognized and removed",
    "timing/lock.py": "the holder of a lock, which is informative only",
    "backends/isolation/worker.py": "its log and the settings of its process",
    "backends/isolation/launch.py": "the log of a child",
    "backends/tensorrt/cache.py": "one line per build, which is not read back",
    "backends/trtexec/process.py": "inputs for a tool, in a temporary folder",
    "app/cluster/case_process.py": "the pipe of its progress",
    "app/cluster/address.py": "a private key, which is readable by its owner only from the first byte",
    "app/cluster/worker.py": "the files and the log of a case, in its folder on the worker",
    "app/cluster/session.py": "into a hidden folder of the cache",
    "testing/backends.py": "models of a test, in its folder",
}
MAKES_TEMPORARY = {
    "_core/files.py",
    "_core/temporary.py",
    "backends/isolation/launch.py",  # in the folder of the launcher
    "backends/isolation/worker.py",  # passes the path of a folder to a child process
    "app/report/record.py",  # excludes its path from records
    "backends/onnxruntime/engine.py",  # in a child process: in the folder of that process
    "backends/onnxruntime_web/node.py",  # the log of its process, a file without a name
    "backends/trtexec/engine.py",
    "backends/trtexec/process.py",
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def opens_for_writing(called: str, call: ast.Call) -> bool:
    if called.split(".")[-1] not in ("open", "fdopen"):
        return False
    words = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = [word.value for word in words if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return any(set(mode) <= set("rwaxbt+") and set(mode) & set("wax+") for mode in modes)


def test_no_module_executes_read_data() -> None:
    for path in FILES:
        for module in imported(path):
            assert not NEVER_IMPORTED.fullmatch(module), f"{path}: {module}"
            assert module != "socket" or name_of(path) in TALKS_TO_CHILDREN
        for called, call in calls(path):
            assert not NEVER_CALLED.fullmatch(called), f"{path}: {called}"
            for keyword in call.keywords:
                if keyword.arg in ("allow_pickle", "shell"):
                    assert ast.unparse(keyword.value) == "False", f"{path}: {called}({keyword.arg}=...)"


def test_files_are_written_atomically() -> None:
    cure = "write it with qdqspec._core.files.write_whole"
    for path in (path for path in FILES if name_of(path) not in WRITES_IN_PLACE):
        for called, call in calls(path):
            is_writing = re.search(r"\.(write_text|write_bytes)$|^shutil\.(copy(file|2|tree)?|move)$", called)
            assert not is_writing, f"{path}:{call.lineno}: {cure}"
            assert not opens_for_writing(called, call), f"{path}:{call.lineno}: {cure}"


def test_temporary_folders_are_created_by_one_module() -> None:
    for path in (path for path in FILES if name_of(path) not in MAKES_TEMPORARY):
        modules = {module.split(".")[0] for module in imported(path)}
        assert "tempfile" not in modules, f"{path}: use qdqspec._core.temporary"


def test_the_listed_modules_exist() -> None:
    there = {name_of(path) for path in FILES}
    assert {*WRITES_IN_PLACE, *MAKES_TEMPORARY, *TALKS_TO_CHILDREN} <= there
