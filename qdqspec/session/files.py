"""The files a tuning run leaves in its folder, and the journal it resumes from. Part of the session."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from qdqspec.errors import OutputError, StateError
from qdqspec.graph.model import Model
from qdqspec.graph.ondisk import LARGE
from qdqspec.graph.save import refuse_overwriting, save_model, write_text
from qdqspec.graph.weights import WeightStore
from qdqspec.measure.journal import Journal
from qdqspec.placement.cache import gather
from qdqspec.placement.cache_file import write_cache
from qdqspec.placement.insert import Inserter
from qdqspec.placement.scheme import write_scheme
from qdqspec.search.select import reaches
from qdqspec.session.kept import MODEL, PATTERNS, RAW_MODEL, SCHEME, Kept
from qdqspec.session.prepare import Prepared, require_path
from qdqspec.types import Interval, Placement, SearchResult, Trial

JOURNAL, REFERENCE, LAYERS = "trials.jsonl", "reference.onnx", "layers.csv"
LOGS = "logs"  # a folder, one file a build
FRONT = "front"  # a folder, where the search had two objectives
_SET_ASIDE = "trials.previous.jsonl"


@contextmanager
def open_journal(folder: Path, header: Mapping[str, object], notes: list[str]) -> Iterator[BuildLogs]:
    """The journal to go on with: an unfinished one of this very run, else a new one.

    A finished journal, and one of another model, spec or device, is set aside as ``trials.previous.jsonl``;
    of the latter ``notes`` is told, as of anything else that was found.
    """
    path = folder / JOURNAL
    if _is_finished(path):
        _set_aside(path)
    try:
        journal = Journal.open(path, header)
    except StateError as error:
        _set_aside(path)
        notes.append(f"{error.what}; it was set aside as {_SET_ASIDE}")
        journal = Journal.open(path, header)
    notes.extend(journal.notes)
    with journal:
        yield BuildLogs(journal, folder)


class BuildLogs:
    """A journal's companion: a readable file for each build, under ``logs/``, beside the journal's line."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal = journal
        self._folder = folder / LOGS
        make_folder(self._folder)
        if not journal.entries():  # a new search: what an earlier one left would be taken for its own
            for old in self._folder.glob("*.log"):
                old.unlink()

    def trials(self) -> tuple[Trial, ...]:
        """The trials in the journal."""
        return self._journal.trials()

    def append(self, trial: Trial, **more: object) -> None:
        """Journal a trial, then write its log."""
        self._journal.append(trial, **more)
        name = f"{trial.number:03d}-{trial.phase}-{trial.placement.digest}.log"
        write_text(self._folder / name, _log_text(trial))


def _log_text(trial: Trial) -> str:
    race = trial.race
    lines = [
        f"trial      {trial.number} ({trial.phase})",
        f"placement  {trial.placement.digest}, {trial.placement.pairs} activation pairs",
        f"status     {trial.status}, built in {trial.build_seconds:.3f} s, optimized graph {trial.graph_hash or '-'}",
        f"ratio      {'-' if trial.ratio is None else f'{trial.ratio:.4f}'} of the reference's time",
    ]
    if trial.sqnr_db is not None:
        lines.append(f"accuracy   {trial.sqnr_db:.1f} dB SQNR")
    if race is not None:
        figures = f"{race.ratio:.4f}, {race.pairs} pairs, p = {race.p_value:.2g}"
        lines.append(f"race       {race.verdict} against {race.opponent}: {figures}")
    if trial.samples.wall_ms:
        lines.append("wall ms    " + " ".join(f"{value:.4f}" for value in trial.samples.wall_ms))
    if trial.samples.cpu_ms:
        lines.append("cpu ms     " + " ".join(f"{value:.4f}" for value in trial.samples.cpu_ms))
    if trial.error:
        lines += ["", trial.error]
    return "\n".join(lines) + "\n"


def _is_finished(path: Path) -> bool:
    """Whether a journal ends with a confirmation, whoever's it is."""
    try:
        last = path.read_bytes().splitlines()[-1:]
        return bool(last) and json.loads(last[0])["phase"] == "confirm"
    except (OSError, ValueError, KeyError, TypeError):
        return False  # missing or damaged: opening it says what is wrong


def _set_aside(path: Path) -> None:
    os.replace(path, path.with_name(_SET_ASIDE))  # noqa: PTH105 - says more than Path.replace that one file goes


def write_results(
    prepared: Prepared, result: SearchResult, raw_winner: Placement, folder: Path, backend: str
) -> None:
    """Write reference, tuned and raw tuned model, scheme and layer times.

    A model that is left alone is its own tuned model. Raises `OutputError` where the folder cannot be written.
    """
    _copy(prepared.given, folder / REFERENCE)
    write_placement(prepared, result.winner, folder / MODEL)
    write_placement(prepared, raw_winner, folder / RAW_MODEL)
    write_scheme(folder / SCHEME, result.winner, prepared.numbers.placed(result.winner), backend)
    write_text(folder / LAYERS, _layers(result.trials, result.winner))
    if result.front:
        _write_front(prepared, result, folder / FRONT)


def _write_front(prepared: Prepared, result: SearchResult, folder: Path) -> None:
    """One model for each placement of the front, fastest first, and what was measured of them."""
    make_folder(folder)
    placements = {trial.placement.digest: trial.placement for trial in result.trials}
    rows = ["file,digest,pairs,ratio,low,high,sqnr_db"]
    for number, point in enumerate(result.front, 1):
        name = f"{number}.onnx"
        write_placement(prepared, placements[point.placement], folder / name)
        figures = (point.ratio.median, point.ratio.low, point.ratio.high, point.sqnr_db)
        rows.append(
            ",".join([name, point.placement, str(point.pairs), *(f"{value:.4f}" for value in figures)])
        )
    write_text(folder / "front.csv", "\n".join(rows) + "\n")


def write_patterns(
    prepared: Prepared,
    trials: Sequence[Trial],
    confirmed: Mapping[str, Interval],
    path: Path,
    backend: str,
    device: str,
) -> None:
    """Write what the search says of each pattern, for the next model to start from.

    What was built of parts of the model says nothing of the whole, and what was not accurate enough is no start.
    """
    least_db = prepared.case.tune.min_sqnr_db
    fit = [trial for trial in trials if not trial.subgraph and reaches(trial, least_db)]
    write_cache(path, gather(fit, prepared.space, backend, device, confirmed=confirmed))


def take_results(kept: Kept, given: Model, folder: Path) -> None:
    """Copy the files of a cached search into the folder of this run; a journal that is there stays."""
    _copy(given, folder / REFERENCE)
    try:
        for file in kept.folder.iterdir():
            wanted = file.name.startswith("tuned") or file.name in (SCHEME, PATTERNS, LAYERS, JOURNAL)
            if wanted and not (file.name == JOURNAL and (folder / JOURNAL).exists()):
                refuse_overwriting(folder / file.name, [require_path(given)])
                shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise OutputError(
            f"results cannot be written: {error.strerror}", where=folder, cure="choose another output folder"
        ) from None


def make_folder(folder: Path) -> None:
    """Make the folder where it is missing; raise `OutputError` where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"the folder cannot be written: {error.strerror}",
            where=folder,
            cure="choose another output folder",
        ) from None


def write_placement(prepared: Prepared, placement: Placement, path: Path) -> None:
    """Write the model with the pairs of a placement; without any it is the user's own."""
    if not placement.sites:
        _copy(prepared.given, path)
        return
    given = require_path(prepared.given)
    with ExitStack() as stack:
        store, base = None, given.parent
        if (
            given.stat().st_size >= LARGE
        ):  # its integer weights stay on disk until they are written, as it did
            base = Path(stack.enter_context(TemporaryDirectory(prefix=".qdqspec-", dir=path.parent)))
            store = WeightStore(base, base=given.parent)
        inserted = Inserter(prepared.model, prepared.numbers, store=store).insert(placement)
        prepared.warnings.extend(note for note in inserted.notes if note not in prepared.warnings)
        save_model(inserted.parts, path, inputs=[given], base=base)


def _copy(given: Model, path: Path) -> None:
    own = require_path(given)
    save_model(given.proto, path, inputs=[own], base=own.parent)


def _layers(trials: tuple[Trial, ...], winner: Placement) -> str:
    """Kernel times of the reference and of what is shipped, as profiled when they were first built."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["model", "kernel", "op_type", "milliseconds", "nodes", "tensors", "boundary", "integer"])
    shipped = next((t for t in trials if t.placement.digest == winner.digest and not t.subgraph), trials[0])
    for role, trial in (("reference", trials[0]), ("tuned", shipped)):
        for layer in trial.layers:
            names = [" ".join(layer.nodes), " ".join(layer.tensors)]
            flags = [str(layer.boundary).lower(), str(layer.integer).lower()]
            table.writerow([role, layer.name, layer.op_type, f"{layer.milliseconds:.6f}", *names, *flags])
    return text.getvalue()
