"""Expands a spec into its cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec.spec.choices import MatrixSection
from qdqspec.spec.kinds import check_ids
from qdqspec.spec.matrix import Choice
from qdqspec.spec.sections import skip_rules
from qdqspec.types import Case, CheckSpec

if TYPE_CHECKING:
    from qdqspec.spec.models import Spec

# The record and field that each axis replaces.
_TARGETS = {
    "quant": ("quantize", "format"),
    "batch": ("inputs", "batch"),
    "calibration": ("quantize", "calibration"),
    "weights": ("quantize", "weights"),
    "activations": ("quantize", "activations"),
    "strategy": ("tune", "strategy"),
    "preset": ("tune", "preset"),
    "backend": ("", "backend"),  # a field of the case itself
}


def cases_of(
    spec: Spec, *, source: Path | None, case_line: int, check_lines: tuple[int, ...]
) -> tuple[Case, ...]:
    """The cases in the order of the matrix; each has all checks."""
    targets = spec.tune.targets or {}
    matrix = spec.matrix
    if targets:
        axis = tuple(targets)
        matrix = (
            MatrixSection(backend=axis) if matrix is None else matrix.model_copy(update={"backend": axis})
        )
    choices = {"default": Choice()} if matrix is None else matrix.cases()
    plain = Case(
        id="default",
        model=spec.model,
        spec=source,
        line=case_line,
        title=spec.title,
        tags=spec.tags,
        targets=targets,
        inputs=spec.inputs.rules(),
        patterns=spec.patterns.rules(),
        regions=spec.regions.rules(),
        quantize=spec.quantize.rules(),
        tune=spec.tune.rules(),
        checks=_checks(spec, check_lines),
        skipping=skip_rules(spec.skip, spec.skip_unless, spec.xfail),
    )
    return tuple(_chosen(plain, name, choice) for name, choice in choices.items())


def _checks(spec: Spec, lines: tuple[int, ...]) -> tuple[CheckSpec, ...]:
    ids = check_ids(spec.checks)
    return tuple(
        CheckSpec(
            id=name,
            kind=entry.kind,
            params=entry.params,
            severity=getattr(entry.params, "severity", "error"),
            line=line,
        )
        for name, entry, line in zip(ids, spec.checks, lines or (1,) * len(ids), strict=True)
    )


def _chosen(plain: Case, name: str, choice: Choice) -> Case:
    """The case with the chosen values in place of its rules."""
    changed: dict[str, Any] = {}
    for axis, value in choice.items():
        record, field = _TARGETS[axis]
        if not record:
            changed[field] = value
            continue
        changed[record] = replace(changed.get(record, getattr(plain, record)), **{field: value})
    return replace(plain, id=name, matrix=choice, **changed)
