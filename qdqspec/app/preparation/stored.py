"""Searches on disk: the journal of a search, from which it resumes, and finished searches in the cache.

A finished search is read back for an equal request: trials, conclusions, tuned model and scheme. Latency is not reused:
a cached winner is always timed again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec import __version__
from qdqspec._core.files import OTHER_FOLDER, explained, file_digest, remove_partial, write_text
from qdqspec._core.node_digests import changes_text
from qdqspec._core.records import from_data, to_data
from qdqspec._core.store import Store, cache_key
from qdqspec.accuracy import all_files
from qdqspec.errors import StateError
from qdqspec.graph import load_model
from qdqspec.search import Journal, trial_from_json, trial_to_json
from qdqspec.types import Data, DataSource, Provenance, SearchResult, Trial

if TYPE_CHECKING:
    from qdqspec.app.preparation.prepare import Prepared

REFERENCE, MODEL, RAW_MODEL = "reference.onnx", "tuned.onnx", "tuned_raw.onnx"
SCHEME, PATTERNS, LAYERS = "scheme.json", "patterns.yaml", "layers.csv"
FLOAT32_FILE = "float32.onnx"  # the user's float16 model in float32, without pairs
CORRECTIONS = "corrections.json"  # those found, for other placements of the same search
# Folders of models with the table in each: of a search with two objectives, and of strategy `region` on request.
FRONT, REGIONS = "front", "regions"
NODES = "nodes"  # the digests of the model's nodes, in the description of an entry
JOURNAL, _CONCLUDED = "trials.jsonl", "search.json"
_MODELS = (MODEL, RAW_MODEL, FLOAT32_FILE)
_FILES = (*_MODELS, *(f"{name}.data" for name in _MODELS), SCHEME, PATTERNS, CORRECTIONS, LAYERS)
STATE_VERSION = 13  # raised when the meaning of an entry changes, which invalidates older entries


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSearch:
    """A finished search and its files; ``is_cut_short`` if the time limit of the run ended it."""

    result: SearchResult
    folder: Path
    is_cut_short: bool = False

    @property
    def model(self) -> Path | None:
        """The tuned model's file; ``None`` if the reference itself is selected."""
        return None if self.result.unchanged else self.folder / MODEL


def keep(store: Store, found: FinishedSearch, prepared: Prepared) -> FinishedSearch:
    """Put a finished search into the cache; returns it with the cached files, unless another process was faster."""

    def fill(folder: Path) -> None:
        lines = [json.dumps(trial_to_json(trial)) for trial in found.result.trials]
        (folder / JOURNAL).write_text("\n".join(lines) + "\n", encoding="utf-8")
        # In full: the placement of everything may be confirmed and selected without a trial of the search.
        conclusions = to_data(replace(found.result, trials=())) | {"about": _description(prepared)}
        (folder / _CONCLUDED).write_text(json.dumps(conclusions, indent=1), encoding="utf-8")
        copy_results(found.folder, folder)

    folder = store.put(prepared.key, fill)
    with suppress(OSError):
        if (folder / SCHEME).read_bytes() == (found.folder / SCHEME).read_bytes():
            return replace(found, folder=folder)
    return found


def copy_results(source: Path, target: Path) -> None:
    """Copy the files of a result, without journal and reference."""
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    for name in (FRONT, REGIONS):
        if table_of(source / name).is_file():
            shutil.copytree(source / name, target / name)


def table_of(folder: Path) -> Path:
    """The table of a folder of models."""
    return folder / f"{folder.name}.csv"


def recall(store: Store, key: str) -> FinishedSearch | None:
    """The finished search under a key, or ``None``. The store has already excluded damaged entries."""
    folder = store.get(key)
    if folder is None:
        return None
    try:
        lines = (folder / JOURNAL).read_text(encoding="utf-8").splitlines()
        trials = tuple(trial_from_json(json.loads(line)) for line in lines)
        data = json.loads((folder / _CONCLUDED).read_text(encoding="utf-8"))
        cached = Provenance(source="cached", age_seconds=store.age_seconds(folder))
        result = replace(from_data(SearchResult, data), trials=trials, provenance=cached)
        return FinishedSearch(result=result, folder=folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        # The entry is intact but not of this version's format; or another process has just removed it.
        store.warn(f"{folder}: a cache entry cannot be read and was ignored ({error!r:.100})")
        store.discard(key)
        return None


def other_winner(store: Store, prepared: Prepared) -> str:
    """The difference of the newest cached search of the same case and device; empty if there is none."""
    wanted = _description(prepared)
    for entry in reversed(store.entries()):
        known = about(entry.folder)
        if all(known.get(name) == wanted[name] for name in ("case", "device", "target")):
            if known.get(NODES) == wanted[NODES]:
                return "the cache has one of other data, rules or options"
            what = changes_text(known.get(NODES, ""), wanted[NODES])
            return f"the cache has one of another model{what and f': {what}'}"
    return ""


def about(entry: Path) -> dict[str, str]:
    """The description stored in an entry; empty for an entry of an earlier version or an unreadable one."""
    try:
        data = json.loads((entry / _CONCLUDED).read_text(encoding="utf-8")).get("about", {})
        return {str(name): str(value) for name, value in data.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _description(prepared: Prepared) -> dict[str, str]:
    return {
        "case": prepared.case.name,
        "model": prepared.given.where,
        "device": prepared.resources.device.key,
        "target": prepared.backend.target,
        NODES: prepared.node_digests,
    }


def search_key(prepared: Prepared) -> str:
    """The cache key of a finished search: model, data, rules, device, options and seed, but not the checks."""
    case, inputs, tune = prepared.case, prepared.case.inputs, prepared.case.tune
    asked = {name: to_data(getattr(case, name)) for name in ("patterns", "quantize", "tune")}
    regions = {**to_data(case.regions), "graph": data_digest(case.regions.graph)}
    data = [data_digest(inputs.calibration), data_digest(inputs.scales), _reference_score(prepared)]
    if tune.objective == "pareto" or tune.limits.min_sqnr_db is not None or tune.accuracy is not None:
        data.append(data_digest(inputs.evaluation))
    if case.quantize.scales == "keep":  # other files of start_from give placements to try first, no numbers
        data += [load_model(path).sha256 for path in tune.start_from if path.suffix.lower() == ".onnx"]
    return cache_key(
        state=STATE_VERSION,
        model=prepared.given.sha256,
        data=data,
        device=prepared.resources.device.key,
        options=dict(sorted(prepared.options.extra.items())),
        seed=prepared.settings.seed,
        shapes=to_data(inputs.profiles),
        batch=inputs.batch,
        regions=regions,
        **asked,
    )


def header_of(prepared: Prepared) -> dict[str, object]:
    """The header of the journal of a search; a journal with another header is not resumed."""
    score = _reference_score(prepared)
    return {
        "model_sha256": prepared.given.sha256,
        "model_nodes": prepared.node_digests,
        "search": prepared.key,
        "backend": prepared.backend.target,
        "device": prepared.resources.device.key,
        "seed": prepared.settings.seed,
        "qdqspec": __version__,
        **({"accuracy": score} if score else {}),
    }


def _reference_score(prepared: Prepared) -> str:
    """The reference's score for an accuracy constraint, since the code of a metric has no digest; empty without one."""
    rules = prepared.case.tune.accuracy
    if rules is None:
        return ""
    reference = prepared.scores.of_reference(rules.metric, rules.output).value
    return f"{rules.key} {reference:.9g} of the reference"


def data_digest(source: DataSource | None) -> str:
    """Hash of a data file, or of several in order of name, with the transform and names; empty for no data."""
    if source is None:
        return ""
    digest = hashlib.sha256()
    for file in all_files(source):
        if file.is_file():
            digest.update(bytes.fromhex(file_digest(file)))
    if isinstance(source, Data):
        digest.update(json.dumps([to_data(source.images), to_data(source.names)], sort_keys=True).encode())
        digest.update(b"labels" if source.labels is not None else b"")
    return digest.hexdigest()


def make_folder(folder: Path) -> None:
    """Create the folder if it is missing; raises `OutputError` on failure."""
    with explained("the folder", folder, OTHER_FOLDER):
        folder.mkdir(parents=True, exist_ok=True)


HEADER = "trials.header.json"
LOGS = "logs"  # a folder, one file a build


@contextmanager
def open_journal(folder: Path, header: Mapping[str, object], notes: list[str]) -> Iterator[LoggedJournal]:
    """The journal of this run: an unfinished one with the same header, else a new one.

    A finished journal, one of another model, spec or device, and a damaged one, whose sound lines are reused, are
    renamed to ``trials.previous.jsonl``; ``notes`` receives the reason, unless the old one is finished.
    """
    path = folder / JOURNAL
    if _is_finished(path):
        _set_aside(path)
        (folder / CORRECTIONS).unlink(missing_ok=True)  # a new search finds its own
    try:
        journal = LoggedJournal.open(path, header)
    except StateError as error:
        aside = _set_aside(path)
        sound = Journal.recover(aside, path, header)
        kept = f", and its first {sound} lines are kept" if sound else ""
        name = Path(error.where or path).name
        notes.append(f"{name}: {error.what}; it was set aside as {aside.name}{kept}")
        journal = LoggedJournal.open(path, header)
    notes.extend(journal.notes)
    with journal:
        yield journal


class LoggedJournal(Journal):
    """A journal that also writes a readable file for each build to ``logs/``."""

    def __init__(self, path: Path, run: str, trials: list[Trial], notes: tuple[str, ...]) -> None:
        self._logs = path.parent / LOGS
        make_folder(self._logs)
        remove_partial(self._logs)  # the previous run may have been killed while writing
        if not trials:  # a new search: logs of an earlier one must not be taken for its own
            for old in self._logs.glob("*.log"):
                old.unlink()
        super().__init__(path, run, trials, notes)

    def append(self, trial: Trial, **more: object) -> None:
        """Append a trial to the journal, then its log: the fields but placement and kernels, and the error."""
        super().append(trial, **more)
        fields = {**trial_to_json(trial), "scheme": None, "layers": None, "error": None}
        lines = [f"{name:<14} {json.dumps(value)}" for name, value in fields.items() if value]
        lines += ["", trial.error] if trial.error else []
        name = f"{trial.number:03d}-{trial.phase}-{trial.placement.digest}.log"
        write_text(self._logs / name, "\n".join(lines) + "\n")


def _is_finished(path: Path) -> bool:
    """Whether a journal ends with a confirmation, or comes from the cache."""
    try:
        last = json.loads(path.read_bytes().splitlines()[-1])
        return last["phase"] == "confirm" or "run" not in last
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return False  # missing or damaged: reported when it is opened


def _set_aside(path: Path) -> Path:
    """Rename a journal without overwriting an unfinished one, and return the new path."""
    for number in itertools.count(1):
        aside = path.with_name(f"trials.previous{f'-{number}' if number > 1 else ''}.jsonl")
        if not aside.exists() or _is_finished(aside):
            with explained("the old journal", aside):
                path.replace(aside)
            break
    return aside
