"""The spec as a pydantic model, the same from a file and from Python; its matrix, and its cases.

`load_spec` reads a file and reports all its problems at once.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from qdqspec._core import registry
from qdqspec.errors import SpecError
from qdqspec.spec.fields import (
    MAX_BYTES,
    Activations,
    Count,
    Formats,
    Listed,
    PathRules,
    Reason,
    SpecPath,
    SpecSection,
    Words,
    path_rules,
    slug,
)
from qdqspec.spec.inputs import InputsSection
from qdqspec.spec.kinds import BackendName, Checks, StrategyName, named_apart, refused
from qdqspec.spec.problems import (
    Loc,
    Problem,
    error_without_file,
    findings,
    source_lines,
    spec_error,
)
from qdqspec.spec.reader import Document
from qdqspec.spec.sections import (
    PatternsSection,
    QuantizeSection,
    RegionsSection,
    SkipUnlessSection,
    TuneSection,
    Xfail,
    rules_of,
)
from qdqspec.types import Case, Granularity, Method, Preset, SkipRules

# The record of a case, and its field, that each axis replaces; "" is the case itself. The order is that of the parts
# of an id, independent of the order in the file: a reordered matrix keeps its baselines.
AXES = {
    "quant": ("quantize", "format"),
    "batch": ("inputs", "batch"),
    "calibration": ("quantize", "calibration"),
    "weights": ("quantize", "weights"),
    "activations": ("quantize", "activations"),
    "strategy": ("tune", "strategy"),
    "preset": ("tune", "preset"),
    "backend": ("", "backend"),
}

MAX_CASES = 256  # of one spec
MAX_COMBINATIONS = 4096  # before exclude, so that expansion is fast

Value: TypeAlias = str | int
Choice: TypeAlias = dict[str, Value]
_T = TypeVar("_T")


def _distinct(values: tuple[_T, ...]) -> tuple[_T, ...]:
    if not values:
        raise PydanticCustomError("axis", "an axis without a value")
    for value, count in Counter(values).items():
        if count > 1:
            raise PydanticCustomError("axis", "'{value}' occurs twice on one axis", {"value": str(value)})
    return values


# Not min_length: pydantic counts valid items, so an invalid value would also be reported as an empty axis.
Axis: TypeAlias = Annotated[
    tuple[_T, ...], Field(strict=False, json_schema_extra={"minItems": 1}), AfterValidator(_distinct)
]


class ChoiceSection(SpecSection):
    """Values of some axes."""

    quant: Formats | None = None
    batch: Count | None = None
    calibration: Method | None = None
    weights: Granularity | None = None
    activations: Activations | None = None
    strategy: StrategyName | None = None
    preset: Preset | None = None
    backend: BackendName | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not chosen(self):
            raise PydanticCustomError("axis", "no axis is named here", {"known": tuple(AXES)})
        return self


class MatrixSection(SpecSection):
    """One case for each combination of the axes' values; a value replaces the rule of its axis."""

    quant: Axis[Formats] | None = Field(
        default=None, description="Replaces quantize.format; a nested list is one case with several formats."
    )
    batch: Axis[Count] | None = Field(
        default=None, description="Replaces the first dimension of every input."
    )
    calibration: Axis[Method] | None = Field(default=None, description="Replaces quantize.calibration.")
    weights: Axis[Granularity] | None = Field(default=None, description="Replaces quantize.weights.")
    activations: Axis[Activations] | None = Field(default=None, description="Replaces quantize.activations.")
    strategy: Axis[StrategyName] | None = Field(default=None, description="Replaces tune.strategy.")
    preset: Axis[Preset] | None = Field(default=None, description="Replaces tune.preset.")
    backend: Axis[BackendName] | None = Field(
        default=None,
        description="The backend of the case, in place of that of the run; all are timed together.",
    )
    exclude: Listed[ChoiceSection] = Field(
        default=(), max_length=MAX_CASES, description="Combinations to exclude."
    )
    include: Listed[ChoiceSection] = Field(
        default=(), max_length=MAX_CASES, description="Values to add, or further combinations."
    )

    @model_validator(mode="after")
    def _can_be_named(self) -> Self:
        self.cases()
        return self

    def cases(self) -> dict[str, Choice]:
        """The values that each case chooses, by case id. Raises ``ValueError`` for no case, too many or equal ids.

        ``int8-b8`` is such an id: words unchanged, numbers with the first letter of their axis.
        """
        choices = combinations(chosen(self), [*map(chosen, self.exclude)], [*map(chosen, self.include)])
        if not choices:
            raise ValueError("the matrix excludes every case")
        if len(choices) > MAX_CASES:
            raise ValueError(f"the matrix gives more than {MAX_CASES} cases")
        named: dict[str, Choice] = {}
        for choice in choices:
            parts = (
                f"{axis[0]}{value}" if isinstance(value, int) else slug(value)
                for axis, value in choice.items()
            )
            name = "-".join(parts)
            if name in named:
                raise ValueError(f"two cases of the matrix are called '{name}'")
            named[name] = choice
        return named


def chosen(section: ChoiceSection | MatrixSection) -> dict[str, Any]:
    """The values given, in the order of the axes: one for each axis, or several in a matrix."""
    return {axis: getattr(section, axis) for axis in AXES if getattr(section, axis) is not None}


def combinations(
    axes: Mapping[str, Sequence[Value]],
    exclude: Sequence[Mapping[str, Value]] = (),
    include: Sequence[Mapping[str, Value]] = (),
) -> tuple[Choice, ...]:
    """All choices of one value per axis, without the excluded, with the included added.

    The rules are those of GitHub Actions: an entry of ``exclude`` removes all combinations that have all its
    values; an entry of ``include`` extends all combinations of the axes whose own values it does not change,
    and becomes a separate combination if there are none.

    Raises ``ValueError`` above `MAX_COMBINATIONS`, before ``exclude`` is applied.
    """
    if math.prod(len(values) for values in axes.values()) > MAX_COMBINATIONS:
        raise ValueError(f"the matrix has more than {MAX_COMBINATIONS:,} combinations before exclude")
    every = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()) if axes)
    kept = (choice for choice in every if not any(entry.items() <= choice.items() for entry in exclude))
    originals = list(itertools.islice(kept, MAX_CASES + 1))
    extended = [dict(choice) for choice in originals]
    added: list[Choice] = []
    for entry in include:
        fits = False
        for choice, changed in zip(originals, extended, strict=True):
            if all(choice.get(axis, value) == value for axis, value in entry.items()):
                changed.update(entry)
                fits = True
        if not fits:
            added.append(dict(entry))
    return tuple({axis: choice[axis] for axis in AXES if axis in choice} for choice in (*extended, *added))


# ---- the spec ------------------------------------------------------------------------------------


class Spec(SpecSection):
    """The checks of one quantized model, with its data and rules.

    Built from a file by `load_spec`, or in Python with the same keys and the same validation:
    ``Spec(model="m.onnx", checks=[{"kind": "speedup", "min": 1.2}])``. Paths are relative to the
    working directory, or to the folder given to `Spec.relative_to`. Raises `SpecError`.
    """

    qdqspec: Literal[1] = Field(default=1, description="Version of the spec format; required in a file.")
    model: SpecPath = Field(description="The ONNX model, relative to the spec.")
    title: str = Field(default="", description="A text for reports.")
    tags: Listed[Words] = Field(default=(), description="Words that pytest -k matches.")
    backend: BackendName | None = Field(
        default=None,
        description="The backend of all cases, in place of that of the run; matrix.backend replaces it.",
    )
    inputs: InputsSection = Field(default=InputsSection(), description="Shapes and data.")
    matrix: MatrixSection | None = Field(default=None, description="One case for each combination of values.")
    patterns: PatternsSection = Field(
        default=PatternsSection(), description="Operators and nodes that may be quantized."
    )
    regions: RegionsSection = Field(
        default=RegionsSection(), description="The division of the model into regions."
    )
    quantize: QuantizeSection = Field(
        default=QuantizeSection(), description="Number formats and calibration."
    )
    tune: TuneSection = Field(default=TuneSection(), description="The search and its budget.")
    checks: Annotated[
        Checks,
        Field(strict=False, description="The checks; at least one.", json_schema_extra={"minItems": 1}),
    ]
    skip: Reason | None = Field(default=None, description="The reason why every case is skipped.")
    skip_unless: SkipUnlessSection | None = Field(
        default=None, description="Requirements on the machine; without them the cases are skipped."
    )
    xfail: Xfail | None = Field(default=None, description="The reason why every case is expected to fail.")

    _source: Path | None = PrivateAttr(None)
    _case_line: int = PrivateAttr(1)
    _check_lines: tuple[int, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _one_family_of_errors(
        cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo
    ) -> Self:
        """Require data and shape profiles that are needed; outside a file, convert pydantic's error to `SpecError`."""
        try:
            spec = handler(value)
            asking: dict[Loc, str] = {
                ("checks", n): f"check '{entry.kind}'"
                for n, entry in enumerate(spec.checks)
                if "accuracy" in getattr(registry.resolve("check", entry.kind), "needs", ())
            }
            if spec.tune.accuracy is not None:
                asking["tune", "accuracy"] = "'tune.accuracy'"
            if asking and spec.inputs.evaluation is None:
                text = "{what} needs inputs.evaluation, which is not given"
                hint = "add inputs: {evaluation: data.npz}, with the model's inputs and 'labels'"
                given = {loc: {"what": what, "hint": hint} for loc, what in asking.items()}
                raise refused({loc: PydanticCustomError("evaluation", text, given[loc]) for loc in given})
            profiles = {
                ("checks", n, "profile"): getattr(entry.params, "profile", None) or 0
                for n, entry in enumerate(spec.checks)
            }
            known = max(len(spec.inputs.shapes), 1)
            if missing := {loc: number for loc, number in profiles.items() if number >= known}:
                text, hint = "there is no shape profile {number}", f"inputs.shapes has 0 to {known - 1}"
                raise refused(
                    {
                        loc: PydanticCustomError("profile", text, {"number": number, "hint": hint})
                        for loc, number in missing.items()
                    }
                )
            return spec
        except ValidationError as error:
            if isinstance(info.context, PathRules) and info.context.roots:
                raise
            raise error_without_file(error, cls, value, where=f"{cls.__name__}(...)") from None

    @classmethod
    def relative_to(cls, base: Path, **keys: Any) -> Self:
        """A spec whose paths are relative to ``base``: ``Spec.relative_to(Path(__file__).parent, ...)``."""
        return cls.model_validate(keys, context=PathRules(base=base))

    def cases(self) -> tuple[Case, ...]:
        """One case for each combination of the matrix, in its order, with all checks; ``default`` without a matrix."""
        lines = itertools.chain(self._check_lines, itertools.repeat(1))
        plain = Case(
            id="default",
            model=self.model,
            spec=self._source,
            line=self._case_line,
            title=self.title,
            tags=self.tags,
            backend=self.backend,
            **rules_of(self),
            checks=tuple(
                replace(check, line=line)
                for check, line in zip(named_apart(self.checks), lines, strict=False)
            ),
            skipping=SkipRules(
                skip=self.skip,
                unless={name: value for name, value in self.skip_unless or () if value is not None},
                xfail=None if self.xfail is None else self.xfail.reason,
                xfail_strict=self.xfail is None or self.xfail.strict,
            ),
        )
        if self.matrix is None:
            return (plain,)
        cases = []
        for name, choice in self.matrix.cases().items():
            changed: dict[str, Any] = {}
            for axis, value in choice.items():
                record, field = AXES[axis]
                if record:
                    changed[record] = replace(changed.get(record, getattr(plain, record)), **{field: value})
                else:
                    changed[field] = value
            cases.append(replace(plain, id=name, matrix=choice, **changed))
        return tuple(cases)

    def located(self, source: Path, case_line: int, check_lines: tuple[int, ...]) -> Self:
        """Set the file and the lines (from 1) at which cases and checks are reported."""
        self._source, self._case_line, self._check_lines = source, case_line, check_lines
        return self


def spec_schema() -> dict[str, Any]:
    """The schema (draft 2020-12) of a spec file, with the parameters of every registered check."""
    schema = _simplify(Spec.model_json_schema(mode="validation"))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "qdqspec spec file (*.qdq.yaml)",
        **schema,
        "description": "The checks of one quantized ONNX model, with its data and rules.",
        "required": ["qdqspec", *schema["required"]],
    }


def _simplify(node: Any) -> Any:
    """The schema without titles, empty defaults and ``null``: a key of a file has a value or is omitted."""
    if isinstance(node, list):
        return [_simplify(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: {name: _simplify(part) for name, part in value.items()}  # names here are user-defined keys
        if key in ("properties", "$defs")
        else _simplify(value)
        for key, value in node.items()
        if not (
            (key == "title" and isinstance(value, str))
            or (key == "default" and (value is None or isinstance(value, dict | list)))
        )
    }
    choices = [choice for choice in kept.pop("anyOf", ()) if choice != {"type": "null"}]
    if len(choices) == 1:
        return {**choices[0], **kept}
    return {**kept, "anyOf": choices} if choices else kept


# ---- files ---------------------------------------------------------------------------------------


def load_spec(path: Path, *, root: Path | None = None, allow_paths: Sequence[Path] = ()) -> Spec:
    """Read and validate a spec file. Raises `SpecError` with each problem at its line and column.

    Paths in the spec are relative to its folder. They must be inside ``root`` (by default the working
    directory), the spec's own folder or one of ``allow_paths``. Messages name the file relative to ``root``.
    Models and data need not exist yet; ``allow_file`` and ``deny_file`` must.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    within = Path(os.path.abspath(root or Path.cwd()))  # noqa: PTH100 - as the path itself
    name = path.relative_to(within).as_posix() if path.is_relative_to(within) else str(path)
    document = Document(_read_text(path, name))
    problems, data = [*document.problems], document.data
    if data or not problems:
        if "qdqspec" not in data:
            hint = "add 'qdqspec: 1' as the first line"
            problems.append(document.locate(Problem(message="'qdqspec' is missing in the spec", hint=hint)))
        try:
            spec = Spec.model_validate(data, context=path_rules(path, root, allow_paths))
        except ValidationError as error:
            problems += map(document.locate, findings(error, Spec, data))
    if problems:
        raise spec_error(problems, document.lines, name)
    lines = tuple(document.line(("checks", n)) for n in range(len(spec.checks)))
    return spec.located(path, document.line(("matrix",)), lines)


def _read_text(path: Path, name: str) -> str:
    """The file as text. Raises if it is not a readable, small UTF-8 file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SpecError("a spec is a file, this is something else", where=name)
        if status.st_size > MAX_BYTES:
            raise SpecError(f"a spec has at most {MAX_BYTES:,} bytes, not {status.st_size:,}", where=name)
        data = path.read_bytes()
    except OSError as error:
        near = registry.did_you_mean(path.name, [other.name for other in path.parent.glob("*.y*ml")])
        what = f"cannot read the spec: {error.strerror}{near}"
        raise SpecError(what, where=name, cure="check the path") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = source_lines(data[: error.start].decode("utf-8-sig", errors="replace"))
        problem = Problem(line=len(before), column=len(before[-1]) + 1, message="the file is not UTF-8 text")
        lines = source_lines(data.decode("utf-8", errors="replace"))
        raise spec_error([problem], lines, name) from None
