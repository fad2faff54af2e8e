"""Reads a spec file; reports all its problems at once."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from qdqspec._core.registry import did_you_mean
from qdqspec.errors import SpecError
from qdqspec.spec.messages import findings
from qdqspec.spec.models import Spec
from qdqspec.spec.paths import PathRules, path_rules
from qdqspec.spec.problems import Problem, source_lines, spec_error
from qdqspec.spec.reader import MAX_BYTES, Document, read_yaml


def load_spec(path: Path, *, root: Path | None = None, allow_paths: Sequence[Path] = ()) -> Spec:
    """Read and validate a spec file. Raises `SpecError` with each problem at its line and column.

    Paths in the spec are relative to its folder. They must be inside ``root`` (by default the working
    directory), the spec's own folder or one of ``allow_paths``. Messages name the file relative to ``root``.
    Models and data need not exist yet; ``allow_file`` and ``deny_file`` must.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    within = Path(os.path.abspath(root or Path.cwd()))  # noqa: PTH100 - as the path itself
    name = path.relative_to(within).as_posix() if path.is_relative_to(within) else str(path)
    text, rules = _text(path, name), path_rules(path, root, allow_paths)
    document = read_yaml(text)
    problems = [*document.problems]
    spec = _validated(document, rules, problems) if document.data or not problems else None
    if spec is None or problems:
        raise spec_error(problems, document.lines, name)
    lines = tuple(document.line(("checks", n)) for n in range(len(spec.checks)))
    return spec.located(path, document.line(("matrix",)), lines)


def _validated(document: Document, rules: PathRules, problems: list[Problem]) -> Spec | None:
    """The spec; ``None`` after adding problems."""
    if "qdqspec" not in document.data:
        message = "'qdqspec' is missing in the spec"
        problems.append(document.problem((), message, hint="add 'qdqspec: 1' as the first line"))
    try:
        return Spec.model_validate(document.data, context=rules)
    except ValidationError as error:
        problems += [
            document.problem(f.loc, f.message, at_key=f.at_key, hint=f.hint, note=f.note)
            for f in findings(error, Spec, document.data)
        ]
    return None


def _text(path: Path, name: str) -> str:
    """The file as text. Raises if it is not a readable, small UTF-8 file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SpecError("a spec is a file, this is something else", where=name)
        if status.st_size > MAX_BYTES:
            raise SpecError(f"a spec has at most {MAX_BYTES:,} bytes, not {status.st_size:,}", where=name)
        data = path.read_bytes()
    except OSError as error:
        near = did_you_mean(path.name, [other.name for other in path.parent.glob("*.y*ml")])
        raise SpecError(
            f"cannot read the spec: {error.strerror}{near}", where=name, cure="check the path"
        ) from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = source_lines(data[: error.start].decode("utf-8-sig", errors="replace"))
        problem = Problem(line=len(before), column=len(before[-1]) + 1, message="the file is not UTF-8 text")
        lines = source_lines(data.decode("utf-8", errors="replace"))
        raise spec_error([problem], lines, name) from None
