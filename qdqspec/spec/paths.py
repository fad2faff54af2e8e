"""Resolves paths of a spec, and checks that they are inside the allowed folders."""

from __future__ import annotations

import errno
import glob
import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

from pydantic import BeforeValidator, PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from qdqspec.spec.reader import MAX_BYTES

_WILD = frozenset("*?[")
_SHOWN = 40  # characters of a name that is too long


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRules:
    """Base folder and restriction of paths.

    They are relative to ``base``, and below one of ``roots`` if there are any. ``from_file`` is true if
    problems are reported at their position in a file.
    """

    base: Path
    roots: tuple[Path, ...] = ()
    from_file: bool = False

    def path(self, text: str) -> Path:
        """The absolute path. Raises if it is invalid, or outside the roots after following links."""
        if not text.strip() or not text.isprintable():
            raise PydanticCustomError("path", "{shown} is not a path", {"shown": repr(text)})
        path = Path(os.path.abspath(self.base / text))  # noqa: PTH100 - resolve() would follow links
        try:
            os.lstat(path)
        except OSError as error:  # other problems are reported when the file is read
            if error.errno == errno.ENAMETOOLONG:
                words = "path '{shown}' is too long for a file's name"
                raise PydanticCustomError("path", words, {"shown": f"{text[:_SHOWN]}..."}) from None
        far = self.far(path)
        if far is not None:
            shown = text if far == path else f"{text.rstrip('/')}/{far.name}"
            raise PydanticCustomError("path", LEADS_OUT, {"text": shown, "hint": CURE})
        return path

    def far(self, path: Path) -> Path | None:
        """A path outside the roots after following links: the path itself, or an entry of the folder."""
        if not self.roots or (self._is_inside(path) and not path.is_dir()):
            return None
        if not self._is_inside(path):
            return path
        # a folder that cannot be listed cannot be read either
        with suppress(OSError), os.scandir(path) as entries:
            links = (Path(entry.path) for entry in entries if entry.is_symlink())
            return next((link for link in links if not self._is_inside(link)), None)
        return None

    def data_path(self, text: str) -> Path:
        """The absolute path of data, or a glob; the same rules as `path` hold for each file that matches."""
        if not _WILD & set(text) or not text.isprintable():
            return self.path(text)
        pattern = Path(os.path.abspath(self.base / text))  # noqa: PTH100 - as in `path`
        if os.path.lexists(pattern):  # a name with brackets
            return self.path(text)
        fixed = Path(*itertools.takewhile(lambda part: not _WILD & set(part), pattern.parts))
        # the search is lazy: no folder outside the roots is listed
        files = map(Path, glob.iglob(str(pattern), recursive=True))  # noqa: PTH207 - it is absolute
        if self.roots and not all(map(self._is_inside, itertools.chain([fixed], files))):
            raise PydanticCustomError("path", LEADS_OUT, {"text": text, "hint": CURE})
        return pattern

    def _is_inside(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(root) for root in self.roots)


LEADS_OUT = "path '{text}' leads out of the root directory"
CURE = "move it below, or allow its folder with --qdq-allow-path"


def path_rules(path: Path, root: Path | None, allow: Sequence[Path]) -> PathRules:
    """The restriction of a spec file: relative to its folder; inside the root, its own folder or ``allow``."""
    base = path.parent
    roots = (root or Path.cwd(), base, *allow)
    return PathRules(base=base, roots=tuple(Path(os.path.realpath(r)) for r in roots), from_file=True)


def _rules_of(info: ValidationInfo) -> PathRules:
    return info.context if isinstance(info.context, PathRules) else PathRules(base=Path.cwd())


def _absolute(value: object, info: ValidationInfo) -> object:
    return _rules_of(info).path(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


def _absolute_data(value: object, info: ValidationInfo) -> object:
    return _rules_of(info).data_path(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


def _listed_names(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """Node-name wildcards of a text file, one per line; ``#`` begins a comment."""
    if not isinstance(value, str | os.PathLike):
        raise PydanticCustomError("path", "a path to a text file is wanted here")
    path = _rules_of(info).path(os.fspath(value))
    lines = (line.partition("#")[0].strip() for line in _text(path, value).splitlines())
    return tuple(line for line in lines if line)


def _text(path: Path, name: object) -> str:
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise OSError(f"it is larger than {MAX_BYTES:,} bytes")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except OSError as error:
        reason = error.strerror or str(error)
    raise PydanticCustomError(
        "path", "cannot read '{name}': {reason}", {"name": str(name), "reason": reason.lower()}
    )


SpecPath: TypeAlias = Annotated[Path, BeforeValidator(_absolute, json_schema_input_type=str)]
DataPath: TypeAlias = Annotated[Path, BeforeValidator(_absolute_data, json_schema_input_type=str)]
NamesFile: TypeAlias = Annotated[tuple[str, ...], PlainValidator(_listed_names, json_schema_input_type=str)]
