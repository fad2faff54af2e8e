"""Warm starts of a search: pattern caches, journals, schemes and quantized models.

Each gives placements of this model that the backend supports, with this case's formats and numbers. They are candidates
like any other: a poor one costs one build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qdqspec.errors import ConfigError, StateError
from qdqspec.graph.model import load_model
from qdqspec.measurement.journal import read_journal
from qdqspec.placement.cache import WarmStart
from qdqspec.placement.cache import warm_starts as cached_starts
from qdqspec.placement.cache_file import read_cache
from qdqspec.placement.import_qdq import placement_for
from qdqspec.placement.project import project
from qdqspec.placement.scheme import read_scheme
from qdqspec.placement.space import SchemeSpace

MOST = 2  # placements taken from a journal; each costs the next search a build


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The target of a warm start: a space, and the backend and device that its placements are measured on."""

    space: SchemeSpace
    backend: str
    device: str
    note: Callable[[str], None]


def warm_starts(paths: Iterable[Path], start: Start) -> tuple[WarmStart, ...]:
    """The placements in the files, each once. Raises for a file that is damaged or of another backend.

    A file without a placement for this model is noted.
    """
    found: dict[str, WarmStart] = {}
    for path in paths:
        starts = [known for known in _reader(path)(path, start) if known.placement.sites or known.proved]
        if not starts:
            start.note(f"{path.name} has nothing to start from for this model")
        for known in starts:
            before = found.get(known.placement.digest, known)
            found[known.placement.digest] = WarmStart(known.placement, known.proved or before.proved)
    return tuple(found.values())


_Reader = Callable[[Path, Start], Iterable[WarmStart]]


def _reader(path: Path) -> _Reader:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(
            "tune.start_from takes pattern caches (.yaml), journals (.jsonl), schemes (.json) and Q/DQ models (.onnx)",
            where=path,
            cure="name a file that a tuning run has left, or a quantized model",
        )
    return reader


def _of_cache(path: Path, start: Start) -> Iterable[WarmStart]:
    try:
        return cached_starts(read_cache(path), start.space.regions, start.space, start.backend, start.device)
    except StateError as error:
        raise StateError(error.what, where=error.where or path, cure=error.cure) from None


def _of_scheme(path: Path, start: Start) -> Iterable[WarmStart]:
    known = read_scheme(path)
    _require_backend("scheme", known.backend, path, start)
    return [WarmStart(project(start.space, known.placement), proved=False)]


def _of_journal(path: Path, start: Start) -> Iterable[WarmStart]:
    """The best placements of an earlier search: by confirmation, or by races if it was interrupted."""
    header, trials = read_journal(path)
    _require_backend("journal", str(header.get("backend")), path, start)
    confirmed = [trial for trial in trials if trial.phase == "confirm" and trial.ok]
    ranked = sorted(confirmed or (t for t in trials if t.incumbent), key=lambda t: (t.ratio or 1.0, t.number))
    placements = dict.fromkeys(trial.placement for trial in ranked)
    for rank, placement in enumerate(list(placements)[:MOST]):
        found = project(start.space, placement)
        fits = found.digest == placement.digest and header.get("device") == start.device
        yield WarmStart(found, proved=bool(confirmed) and rank == 0 and fits)


def _require_backend(what: str, backend: str, path: Path, start: Start) -> None:
    if backend != start.backend:
        raise StateError(
            f"the {what} was made on {backend}, not on {start.backend}: "
            "what is fast on one backend is slow on another",
            where=path,
            cure=f"start from a {path.name} that a run on {start.backend} has left",
        )


def _of_model(path: Path, start: Start) -> Iterable[WarmStart]:
    fitted = placement_for(start.space.model, load_model(path))
    for line in fitted.notes:
        start.note(f"{path.name}: {line}")
    return [WarmStart(project(start.space, fitted.placement), proved=False)]


_READERS: Mapping[str, _Reader] = {
    ".yaml": _of_cache,
    ".yml": _of_cache,
    ".json": _of_scheme,
    ".jsonl": _of_journal,
    ".onnx": _of_model,
}
