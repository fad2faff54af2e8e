"""Finds the cases of ``specs/``, ``specs/a.qdq.yaml`` or ``specs/a.qdq.yaml::int8-b8``. It opens YAML only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from qdqspec._core.config import Settings
from qdqspec._core.registry import did_you_mean
from qdqspec.errors import ConfigError, SpecError
from qdqspec.types import Case, Data, DataSource

SPEC_SUFFIXES = (".qdq.yaml", ".qdq.yml")
YAML = (".yaml", ".yml")


def is_spec(path: Path) -> bool:
    """Whether a file is a spec by its name."""
    return path.name.endswith(SPEC_SUFFIXES)


def find_specs(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Named spec files, and the spec files below named folders, sorted in each folder. Hidden folders are skipped."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        below = sorted(file for file in path.rglob("*") if is_spec(file) and file.is_file())
        found += [file for file in below if not any(p.startswith(".") for p in file.relative_to(path).parts)]
    return tuple(dict.fromkeys(found))


def load_cases(path: Path, settings: Settings) -> tuple[Case, ...]:
    """All cases of a spec file. Raises `SpecError` listing all its problems."""
    from qdqspec.spec import load_spec

    return tuple(load_spec(path, root=settings.root, allow_paths=settings.allow_path).cases())


def find_cases(reference: str, settings: Settings, base: Path) -> tuple[Case, ...]:
    """The cases of ``file`` or the one of ``file::case``; a relative file is relative to ``base``."""
    file, _, case_id = reference.partition("::")
    path = base / file
    if path.is_dir():
        raise ConfigError(
            "this is a folder",
            where=file,
            cure=f"name a model or spec, or run all specs in it: pytest {file}",
        )
    if path.exists() and path.suffix not in YAML:
        endings = " or ".join(SPEC_SUFFIXES)
        if path.suffix == ".onnx":  # a command that takes models has loaded it
            raise ConfigError("this is no spec", where=file, cure=f"name a file that ends in {endings}")
        raise ConfigError(
            "this is neither a model nor a spec",
            where=file,
            cure=f"name a file that ends in .onnx, {endings}",
        )
    cases = load_cases(path, settings)
    if not case_id:
        return cases
    chosen = tuple(case for case in cases if case.id == case_id)
    if not chosen:
        known = [case.id for case in cases]
        raise SpecError(
            f"there is no case '{case_id}'{did_you_mean(case_id, known)}",
            where=base / file,
            cure=f"its cases: {', '.join(known)}",
        )
    return chosen


def find_case(reference: str, settings: Settings, base: Path) -> Case:
    """The one case of a reference. Raises `ConfigError` naming them if the spec has several."""
    cases = find_cases(reference, settings, base)
    if len(cases) > 1:
        raise ConfigError(
            f"this spec has {len(cases)} cases, and one is wanted",
            where=reference,
            cure=f"name one: {', '.join(f'{reference}::{case.id}' for case in cases)}",
        )
    return cases[0]


def with_paths(case: Case, path: Callable[[Path | None], Path | None]) -> Case:
    """The case with all paths as ``path`` returns them, also those of its data."""

    def data(source: DataSource | None) -> DataSource | None:
        if not isinstance(source, Data):
            return path(source)
        return replace(source, path=path(source.path), labels=path(source.labels))

    model = path(case.model)
    assert model is not None
    return replace(
        case,
        model=model,
        spec=path(case.spec),
        inputs=replace(
            case.inputs,
            calibration=data(case.inputs.calibration),
            scales=path(case.inputs.scales),
            evaluation=data(case.inputs.evaluation),
        ),
        regions=replace(case.regions, graph=path(case.regions.graph)),
        tune=replace(case.tune, start_from=tuple(filter(None, map(path, case.tune.start_from)))),
    )
