"""Turns a spec into its cases. May import floor 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec.spec.kinds import check_ids
from qdqspec.spec.matrix import Choice
from qdqspec.spec.sections import skip_rules
from qdqspec.types import Case, CheckSpec

if TYPE_CHECKING:
    from qdqspec.spec.models import Spec

# Which field of which record an axis replaces.
_QUANTIZE = {
    "quant": "format",
    "calibration": "calibration",
    "weights": "weights",
    "activations": "activations",
}
_TUNE = {"strategy": "strategy", "preset": "preset"}


def cases_of(
    spec: Spec, *, source: Path | None, case_line: int, check_lines: tuple[int, ...]
) -> tuple[Case, ...]:
    """The cases in the order of the matrix; each has every check."""
    choices = {"default": Choice()} if spec.matrix is None else spec.matrix.cases()
    plain = Case(
        id="default",
        model=spec.model,
        spec=source,
        line=case_line,
        title=spec.title,
        tags=spec.tags,
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
    return replace(
        plain,
        id=name,
        matrix=choice,
        inputs=replace(plain.inputs, batch=choice.get("batch")),
        quantize=replace(plain.quantize, **_renamed(choice, _QUANTIZE)),
        tune=replace(plain.tune, **_renamed(choice, _TUNE)),
    )


def _renamed(choice: Choice, fields: Mapping[str, str]) -> dict[str, object]:
    return {fields[axis]: value for axis, value in choice.items() if axis in fields}
