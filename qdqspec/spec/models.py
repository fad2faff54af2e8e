"""The spec as a pydantic model, the same from a file and from Python, and its cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from qdqspec.spec.fields import Listed, Reason, SpecSection, Words
from qdqspec.spec.inputs import InputsSection
from qdqspec.spec.kinds import BackendName, CheckEntry, Checks, check_ids, needs_labels, refused
from qdqspec.spec.matrix import AXES, Choice, MatrixSection
from qdqspec.spec.messages import error_without_file
from qdqspec.spec.paths import PathRules, SpecPath
from qdqspec.spec.reader import Loc
from qdqspec.spec.sections import (
    PatternsSection,
    QuantizeSection,
    RegionsSection,
    SkipUnlessSection,
    TuneSection,
    Xfail,
    skip_rules,
)
from qdqspec.types import Case, CheckSpec


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
        """Outside a file, convert pydantic's error to `SpecError`."""
        try:
            spec = handler(value)
            require_evaluation(spec.inputs, spec.tune, spec.checks)
            return spec
        except ValidationError as error:
            if isinstance(info.context, PathRules) and info.context.from_file:
                raise
            raise error_without_file(error, cls, value, where=f"{cls.__name__}(...)") from None

    @classmethod
    def relative_to(cls, base: Path, **keys: Any) -> Self:
        """A spec whose paths are relative to ``base``: ``Spec.relative_to(Path(__file__).parent, ...)``."""
        return cls.model_validate(keys, context=PathRules(base=base))

    def cases(self) -> tuple[Case, ...]:
        """One case for each combination of the matrix, in its order, with all checks; ``default`` without a matrix."""
        choices = {"default": Choice()} if self.matrix is None else self.matrix.cases()
        plain = Case(
            id="default",
            model=self.model,
            spec=self._source,
            line=self._case_line,
            title=self.title,
            tags=self.tags,
            backend=self.backend,
            inputs=self.inputs.rules(),
            patterns=self.patterns.rules(),
            regions=self.regions.rules(),
            quantize=self.quantize.rules(),
            tune=self.tune.rules(),
            checks=_make_checks(self.checks, self._check_lines),
            skipping=skip_rules(self.skip, self.skip_unless, self.xfail),
        )
        return tuple(_apply_choice(plain, name, choice) for name, choice in choices.items())

    def located(self, source: Path, case_line: int, check_lines: tuple[int, ...]) -> Self:
        """Set the file and the lines (from 1) at which cases and checks are reported."""
        self._source, self._case_line, self._check_lines = source, case_line, check_lines
        return self


def require_evaluation(inputs: InputsSection, tune: TuneSection, checks: Sequence[CheckEntry]) -> None:
    """Raise pydantic's ``ValidationError`` at each place that needs evaluation data, if there is none."""
    if inputs.evaluation is not None:
        return
    asking: dict[Loc, str] = {
        ("checks", n): f"check '{entry.kind}'" for n, entry in enumerate(checks) if needs_labels(entry.kind)
    }
    if tune.accuracy is not None:
        asking["tune", "accuracy"] = "'tune.accuracy'"
    text = "{what} needs inputs.evaluation, which is not given"
    hint = "add inputs: {evaluation: data.npz}, with the model's inputs and 'labels'"
    errors = {
        loc: PydanticCustomError("evaluation", text, {"what": what, "hint": hint})
        for loc, what in asking.items()
    }
    if errors:
        raise refused(errors)


def _make_checks(checks: tuple[CheckEntry, ...], lines: tuple[int, ...]) -> tuple[CheckSpec, ...]:
    ids = check_ids(checks)
    return tuple(
        CheckSpec(
            id=name,
            kind=entry.kind,
            params=entry.params,
            severity=getattr(entry.params, "severity", "error"),
            line=line,
        )
        for name, entry, line in zip(ids, checks, lines or (1,) * len(ids), strict=True)
    )


def _apply_choice(plain: Case, name: str, choice: Choice) -> Case:
    """The case with the chosen values in place of its rules."""
    changed: dict[str, Any] = {}
    for axis, value in choice.items():
        record, field = AXES[axis]
        if not record:
            changed[field] = value
            continue
        changed[record] = replace(changed.get(record, getattr(plain, record)), **{field: value})
    return replace(plain, id=name, matrix=choice, **changed)


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
