"""The page of Python names: exports of ``qdqspec``, the types that they return, errors, fixtures and hooks."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType

import qdqspec
from qdqspec import errors, types
from qdqspec.app.plugin import fixtures, hooks
from qdqspec.app.preparation.runtimes import Resources

_GIVEN = (fixtures.CaseView, fixtures.LatencyView)
_MADE = {
    qdqspec.Result,
    qdqspec.Study,
    *_GIVEN,
    Resources,
}  # returned by functions; users do not call their constructors
_WIDTH = 100


def python_names(options: Iterator[str]) -> Iterator[str]:
    """The lines of the page; ``options`` are the table of a case's options."""
    yield "Everything in `qdqspec.__all__`. Examples are in [From Python](../how-to/python.md). The names load on first"
    yield "use, so that `import qdqspec` imports no other library. `qdqspec.__version__` is the version of the package."
    yield ""
    yield "A `PathLike` is a path or its text; a `GivenModel` may also be an `onnx.ModelProto`; `Spec.cases` returns"
    yield "each `Case`. `**asked` are [options of a case](#options-of-a-case) together with [options of a"
    yield "session](options.md), with underscores for hyphens; a `Session` takes its own when it is opened."
    public = [getattr(qdqspec, name) for name in qdqspec.__all__ if name != "__version__"]
    functions = [one for one in public if inspect.isfunction(one)]
    classes = [one for one in public if inspect.isclass(one) and not issubclass(one, Exception)]
    yield from ("", "## Functions")
    for function in functions:
        yield from ("", f"### {function.__name__}", "", *_signature(function), "", _text(function))
    yield from ("", "## Classes")
    for found in classes:
        yield from _class(found)
    yield from ("", "## Options of a case", "", *options)
    yield from ("", "## Fixtures", "", _text(fixtures))
    marked = {key: one for key, one in vars(fixtures).items() if isinstance(one, type(fixtures.qdq_case))}
    yield from _table("fixture", {f"`{key}`": one for key, one in marked.items() if key.startswith("qdq")})
    for found in _GIVEN:
        yield from _class(found)
    yield from ("", "## Hooks", "", _text(hooks))
    called = [one for key, one in vars(hooks).items() if key.startswith("pytest_")]
    for function in called:
        yield from ("", f"### {function.__name__}", "", *_signature(function), "", _text(function))
    yield from ("", "## Types of results", "", "The names above return them. They are frozen;")
    yield "[the JSON record](record.md) holds most of them."
    for found in _returned([*functions, *classes, *_GIVEN, *called]):
        yield from _class(found)
    yield from ("", "## Errors", "", "All are in `qdqspec.errors`, and derive from `QdqspecError`.")
    yield from _table(
        "error", {f"`{key}`": one for key, one in vars(errors).items() if key.endswith("Error")}
    )


def _class(found: type) -> Iterator[str]:
    """The heading, docstring, constructor or fields, and public members of a class."""
    yield from ("", f"### {found.__name__}", "", _text(found), "")
    if dataclasses.is_dataclass(found):
        yield from ("```text", *_fields(found), "```")
    elif found not in _MADE:
        yield from _signature(found)
    members = {}
    for key, member in _own(found):
        words = ": " if isinstance(vars(found)[key], property) else f"({', '.join(_each(member))}) -> "
        members[f"`{key}{words}{_result(member)}`"] = member
    if members:
        yield from _table("attribute or method", members)


def _fields(found: type) -> Iterator[str]:
    """The fields of a dataclass with their types, and their comments in the source."""
    source = textwrap.dedent(inspect.getsource(found))
    lines, (tree,) = source.splitlines(), ast.parse(source).body
    for one in ast.iter_child_nodes(tree):
        if isinstance(one, ast.AnnAssign) and not (name := ast.unparse(one.target)).startswith("_"):
            comments = (line.partition("  # ")[2] for line in lines[one.lineno - 1 : one.end_lineno])
            comment = next(filter(None, comments), "")
            yield f"{name}: {ast.unparse(one.annotation)}" + (f"  # {comment}" if comment else "")


def _own(found: type) -> Iterator[tuple[str, FunctionType]]:
    """The public properties and methods of a class, in the order of the source."""
    for key, member in vars(found).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and function.__module__ == found.__module__ and key[0] != "_":
            yield key, function


def _returned(sources: Iterable[Callable[..., object]]) -> Iterator[type]:
    """The dataclasses of the package that functions and members return, by name."""
    functions = [one for one in sources if inspect.isfunction(one)]
    functions += [member for one in sources if inspect.isclass(one) for _, member in _own(one)]
    names = {name: one for one in functions for name in re.findall(r"\b[A-Z]\w+", _result(one))}
    for name, function in sorted(names.items()):
        found = function.__globals__.get(name, getattr(types, name, None))
        if dataclasses.is_dataclass(found) and found not in _MADE:
            assert isinstance(found, type)
            yield found


# ---- parts ------------------------------------------------------------------------------------------


def _signature(found: Callable[..., object]) -> Iterator[str]:
    """A block with the call, one parameter per line if it is long."""
    arrow = f" -> {_result(found)}" if inspect.isfunction(found) else ""
    line = f"{found.__name__}({', '.join(_each(found))}){arrow}"
    if len(line) > _WIDTH:
        line = f"{found.__name__}(\n    " + ",\n    ".join(_each(found)) + f",\n){arrow}"
    yield f"```text\n{line}\n```"


def _each(found: Callable[..., object]) -> Iterator[str]:
    """The parameters with their types and defaults, as in the source."""
    if hasattr(found, "model_fields"):
        yield "**keys"  # the options of a spec
        return
    is_keyword = False
    for one in inspect.signature(found).parameters.values():
        if one.name in ("self", "cls"):
            continue
        if one.kind is one.VAR_KEYWORD:
            yield f"**{one.name}"
            continue
        if one.kind is one.KEYWORD_ONLY and not is_keyword:
            yield "*"
            is_keyword = True
        yield f"{one.name}: {one.annotation}" + ("" if one.default is one.empty else f" = {one.default!r}")


def _result(function: Callable[..., object]) -> str:
    return str(inspect.signature(function).return_annotation)


def _text(found: object) -> str:
    """A docstring as Markdown."""
    return (inspect.getdoc(found) or "").replace("``", "`")


def _table(column: str, rows: dict[str, object]) -> Iterator[str]:
    """One row for each name, with the first paragraph of its docstring."""
    yield from ("", f"| {column} | meaning |", "| --- | --- |")
    for name, one in rows.items():
        cells = (name, _text(one).partition("\n\n")[0])
        yield "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in cells) + " |"
