"""Types of values that all sections of a spec share: number formats, ids, text, numbers, paths within allowed folders.

Numbers are strict: text is not a number, ``true`` is not ``1``. Parameters of checks use them too.
Number formats are repeated here, because the package that computes with them imports numpy, which collection must not.
A test compares both lists.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from qdqspec._core.units import is_share

# Formats of Q/DQ pairs. A format is added to `quantize.formats` and to this line.
Format: TypeAlias = Literal[
    "int8", "uint8", "int16", "uint16", "fp8", "int8_b16", "int8_b32", "int8_b64", "int8_b128", "int8_b256",
    "int4", "uint4", "nvfp4", "mxfp8",
]  # fmt: skip
Activations: TypeAlias = Literal["auto", "int8", "uint8", "int16", "uint16", "fp8"]
Correction: TypeAlias = Literal["bits", "equalization", "bias", "ranges"]
LabelKind: TypeAlias = Literal["in+out", "in-only", "dynamic"]


def is_id(text: str) -> bool:
    """Whether the text can be part of a test id: pytest 9.2 loses brackets, xdist splits at ``@``."""
    return re.fullmatch(r"[a-z0-9][a-z0-9._-]*", text) is not None


def slug(text: str) -> str:
    """The text as part of an id: lower case, other characters as dashes; may be empty."""
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")


_T = TypeVar("_T")

# A YAML list. Strict for its items; a list and a tuple are both accepted.
Listed: TypeAlias = Annotated[tuple[_T, ...], Field(strict=False)]


def short_form(kinds: type | tuple[type, ...], expand: Callable[[Any], Any], written: Any) -> BeforeValidator:
    """Lets values of some kinds stand for what ``expand`` makes of them; ``written`` is the type in the JSON Schema."""
    return BeforeValidator(
        lambda value: expand(value) if isinstance(value, kinds) else value, json_schema_input_type=written
    )


def _not_empty(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty", "empty text where a text is required")
    return text


def _explained(text: str) -> str:
    """Reject ``skip: no``, which YAML reads as the text "no": as a reason, it would skip the case."""
    if text.strip().lower() in ("yes", "no", "on", "off", "true", "false", "y", "n"):
        raise PydanticCustomError(
            "reason", "'{text}' is no reason: remove the key, or state the reason", {"text": text}
        )
    return text


def _fraction(value: object) -> object:
    """``5%`` as 0.05; other values are returned unchanged."""
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return value
    try:
        return float(value.strip()[:-1]) / 100
    except ValueError:
        raise ValueError(f"'{value}' is not a percentage such as 5%") from None


Words: TypeAlias = Annotated[str, AfterValidator(_not_empty), Field(json_schema_extra={"minLength": 1})]
Reason: TypeAlias = Annotated[Words, AfterValidator(_explained)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=10**9)]
Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[Number, Field(gt=0)]
Fraction: TypeAlias = Annotated[Number, BeforeValidator(_fraction, json_schema_input_type=float | str)]


class SpecSection(BaseModel):
    """A mapping of the spec. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class MetricLimits(BaseModel):
    """Limits of a task metric, in the search and in the check ``accuracy``."""

    metric: Words = Field(
        default="top1",
        description="top1, top5, any top<k>, miou, or the name of a metric of fixture qdq_metrics.",
    )
    min: Fraction | None = Field(default=None, description="Smallest value of the tuned model: 0.97 or 97%.")
    max_drop: Annotated[Fraction, Field(ge=0)] | None = Field(
        default=None, description="Largest loss against the reference, in the metric's own unit: 0.01 or 1%."
    )
    output: Words | None = Field(default=None, description="The output that is scored (default: the first).")

    @model_validator(mode="after")
    def _of_a_share(self) -> Self:
        """Reject a limit beyond 1 of a share, such as 97 meant as 97 %, and a ``max_drop`` of 1."""
        wrong = [limit for limit in (self.min, self.max_drop) if limit is not None and limit > 1]
        wrong += [1.0] if self.max_drop == 1 else []
        if wrong and is_share(self.metric):
            cure = f"write {wrong[0]:g}% or {wrong[0] / 100:g}"
            raise ValueError(f"{self.metric} is a share, and {wrong[0]:g} of it is no valid limit: {cure}")
        return self


_FORMATS = get_args(Format)
_WORD = "|".join(_FORMATS)
_Joined: TypeAlias = Annotated[str, Field(pattern=rf"^({_WORD})(\+({_WORD}))+$")]
_Listed: TypeAlias = Annotated[list[Format], Field(min_length=1, json_schema_extra={"uniqueItems": True})]


def _joined(value: object) -> str:
    """``[int8, int4]`` and ``int8+int4`` as the latter, which names and ids contain."""
    words: list[Any] = value.split("+") if isinstance(value, str) else [value]
    if is_list := isinstance(value, list | tuple) and bool(value):
        words = [*value]
    expected = {"expected": " or ".join(map(repr, _FORMATS))}
    wrong = [  # each of a list at its own index
        InitErrorDetails(type="literal_error", loc=(index,) if is_list else (), input=word, ctx=expected)
        for index, word in enumerate(words)
        if word not in _FORMATS
    ]
    if wrong:
        raise ValidationError.from_exception_data("formats", wrong)
    for word in words:
        if words.count(word) > 1:
            raise PydanticCustomError("formats", "'{word}' occurs twice among the formats", {"word": word})
    return "+".join(words)


Formats: TypeAlias = Annotated[
    str, BeforeValidator(_joined, json_schema_input_type=Format | _Joined | _Listed)
]


# ---- paths ---------------------------------------------------------------------------------------

MAX_BYTES = 1_000_000  # of a spec, and of a file of names
LEADS_OUT = "path '{text}' leads out of the root directory"
CURE = "move it below, or allow its folder with --qdq-allow-path"
_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRules:
    """Base folder and restriction of paths.

    They are relative to ``base``, and below one of ``roots`` if there are any, as for a file.
    """

    base: Path
    roots: tuple[Path, ...] = ()

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
                raise PydanticCustomError("path", words, {"shown": f"{text[:40]}..."}) from None
        far = self.far(path)
        if far is not None:
            shown = text if far == path else f"{text.rstrip('/')}/{far.name}"
            raise PydanticCustomError("path", LEADS_OUT, {"text": shown, "hint": CURE})
        return path

    def far(self, path: Path) -> Path | None:
        """A path outside the roots after following links: the path itself, or an entry of the folder."""
        if not self._is_inside(path):
            return path
        if self.roots and path.is_dir():
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
        real = Path(os.path.realpath(path)) if self.roots else path
        return not self.roots or any(real.is_relative_to(root) for root in self.roots)


def path_rules(path: Path, root: Path | None, allow: Sequence[Path]) -> PathRules:
    """The restriction of a spec file: relative to its folder; inside the root, its own folder or ``allow``."""
    base = path.parent
    roots = (root or Path.cwd(), base, *allow)
    return PathRules(base=base, roots=tuple(Path(os.path.realpath(r)) for r in roots))


def _rules_of(info: ValidationInfo) -> PathRules:
    return info.context if isinstance(info.context, PathRules) else PathRules(base=Path.cwd())


def _absolute(value: object, info: ValidationInfo) -> object:
    return _rules_of(info).path(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


def _absolute_data(value: object, info: ValidationInfo) -> object:
    return _rules_of(info).data_path(os.fspath(value)) if isinstance(value, str | os.PathLike) else value


def _listed_names(value: object, info: ValidationInfo) -> tuple[str, ...]:
    """Node-name wildcards of a text file, one per line; ``#`` begins a comment, but is part of the name ``Conv#3``."""
    if not isinstance(value, str | os.PathLike):
        raise PydanticCustomError("path", "a path to a text file is wanted here")
    path, reason = _rules_of(info).path(os.fspath(value)), "it is not UTF-8"
    try:
        if path.exists() and not path.is_file():
            raise OSError("it is not a file")
        if path.stat().st_size > MAX_BYTES:
            raise OSError(f"it is larger than {MAX_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8-sig")
        lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in text.splitlines())
        return tuple(line for line in lines if line)
    except UnicodeDecodeError:
        pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    raise PydanticCustomError(
        "path", "cannot read '{name}': {reason}", {"name": str(value), "reason": reason}
    )


SpecPath: TypeAlias = Annotated[Path, BeforeValidator(_absolute, json_schema_input_type=str)]
DataPath: TypeAlias = Annotated[Path, BeforeValidator(_absolute_data, json_schema_input_type=str)]
NamesFile: TypeAlias = Annotated[tuple[str, ...], PlainValidator(_listed_names, json_schema_input_type=str)]
