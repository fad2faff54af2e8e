"""The placements of earlier searches and of quantized models, from which a search starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from qdqspec.errors import ConfigError, StateError
from qdqspec.graph.model import load_model
from qdqspec.qdq.read.import_qdq import placement_for
from qdqspec.qdq.scheme.cache import read_cache
from qdqspec.qdq.scheme.cache import warm_starts as cached_starts
from qdqspec.qdq.scheme.scheme_file import read_scheme
from qdqspec.qdq.space.search_space import SchemeSpace, project
from qdqspec.search.journal import read_journal
from qdqspec.types import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The target of a warm start: a space, and the backend and device that its placements are measured on."""

    space: SchemeSpace
    backend: str
    device: str
    note: Callable[[str], None]


def warm_starts(paths: Iterable[Path], start: Start) -> tuple[Placement, ...]:
    """The placements in the files, each once. Raises for a file that is damaged or of another backend.

    Each is a placement of this model that the backend supports. It is a candidate like any other: a poor one costs one
    build. A file without a placement for this model is noted.
    """
    found: dict[str, Placement] = {}
    for path in paths:
        reader = _READERS.get(path.suffix.lower())
        if reader is None:
            raise ConfigError(
                "tune.start_from takes pattern caches (.yaml), journals (.jsonl), schemes (.json) and Q/DQ models "
                "(.onnx)",
                where=path,
                cure="name a file that a tuning run has left, or a quantized model",
            )
        starts = list(reader(path, start))
        if not starts:
            start.note(f"{path.name} contains no placement for this model")
        found |= {placement.digest: placement for placement in starts}
    return tuple(found.values())


def _of_cache(path: Path, start: Start) -> Iterable[Placement]:
    try:
        return cached_starts(read_cache(path), start.space.regions, start.space, start.backend, start.device)
    except StateError as error:
        raise StateError(error.what, where=error.where or path, cure=error.cure) from None


def _of_scheme(path: Path, start: Start) -> Iterable[Placement]:
    known = read_scheme(path)
    _require_backend("scheme", known.backend, path, start)
    return _projected([known.placement], start.space)


def _of_journal(path: Path, start: Start, most: int = 2) -> Iterable[Placement]:
    """The best placements of an earlier search: by confirmation, or by races if it was interrupted.

    There are ``most``: each costs the next search a build.
    """
    header, trials = read_journal(path)
    _require_backend("journal", str(header.get("backend")), path, start)
    confirmed = [trial for trial in trials if trial.phase == "confirm" and trial.ok]
    ranked = sorted(confirmed or (t for t in trials if t.incumbent), key=lambda t: (t.ratio or 1.0, t.number))
    placements = dict.fromkeys(trial.placement for trial in ranked)
    return _projected(islice(placements, most), start.space)


def _projected(placements: Iterable[Placement], space: SchemeSpace) -> list[Placement]:
    """The parts of placements that a space has; placements without such a part are left out."""
    return [fitted for placement in placements if (fitted := project(space, placement)).sites]


def _require_backend(what: str, backend: str, path: Path, start: Start) -> None:
    if backend != start.backend:
        raise StateError(
            f"the {what} was made on {backend}, not on {start.backend}: speed differs between backends",
            where=path,
            cure=f"start from a {path.name} that a run on {start.backend} has left",
        )


def _of_model(path: Path, start: Start) -> Iterable[Placement]:
    fitted = placement_for(start.space.model, load_model(path))
    for line in fitted.notes:
        start.note(f"{path.name}: {line}")
    return _projected([fitted.placement], start.space)


_READERS: Mapping[str, Callable[[Path, Start], Iterable[Placement]]] = {
    ".yaml": _of_cache,
    ".yml": _of_cache,
    ".json": _of_scheme,
    ".jsonl": _of_journal,
    ".onnx": _of_model,
}
