"""The files that a tuning run writes to its folder, and the journal that it resumes from."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from qdqspec.config import hooks
from qdqspec.errors import OutputError, StateError
from qdqspec.files import RESULT, explained, partial_folder, remove_partial
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.save import refuse_overwriting, save_model, write_text
from qdqspec.graph.weights import WeightStore
from qdqspec.graph.wire import LARGE
from qdqspec.measurement.journal import Journal
from qdqspec.placement.edit.equalize import branches_of, equalized
from qdqspec.placement.edit.insert import Inserter
from qdqspec.placement.scheme.cache import gather, write_cache
from qdqspec.placement.scheme.scheme_file import write_scheme
from qdqspec.preparation.cached import (
    CORRECTIONS,
    FLOAT32_FILE,
    FRONT,
    LAYERS,
    MODEL,
    PATTERNS,
    RAW_MODEL,
    REFERENCE,
    REGIONS,
    SCHEME,
    FinishedSearch,
    table_of,
)
from qdqspec.preparation.prepare import Prepared
from qdqspec.search.select import reaches
from qdqspec.search.strategies.region import best_by_pattern
from qdqspec.types import FLOAT32, Interval, LayerTime, Placement, SearchResult, Trial

JOURNAL, HEADER = "trials.jsonl", "trials.header.json"
LOGS = "logs"  # a folder, one file a build
_CURE = "choose another output folder: --qdq-output DIR of pytest, -o DIR of a verb"
_NUMBERED = re.compile(r"[0-9]+\.(onnx|onnx\.data|sh)")


# ---- the journal ----------------------------------------------------------------------------------------


@contextmanager
def open_journal(folder: Path, header: Mapping[str, object], notes: list[str]) -> Iterator[BuildLogs]:
    """The journal of this run: an unfinished one with the same header, else a new one.

    A finished journal is renamed to ``trials.previous.jsonl``. So is one of another model, spec or device, and a
    damaged one, whose lines before the damage are reused; for these two ``notes`` receives a line, as for other
    findings. An unfinished journal is never overwritten.
    """
    path = folder / JOURNAL
    if _is_finished(path):
        _set_aside(path)
        (folder / CORRECTIONS).unlink(missing_ok=True)  # a new search finds its own
    try:
        journal = Journal.open(path, header)
    except StateError as error:
        aside = _set_aside(path)
        sound = Journal.recover(aside, path, header)
        kept = f", and its first {sound} lines are kept" if sound else ""
        name = Path(error.where or path).name
        notes.append(f"{name}: {error.what}; it was set aside as {aside.name}{kept}")
        journal = Journal.open(path, header)
    notes.extend(journal.notes)
    with journal:
        yield BuildLogs(journal, folder)


class BuildLogs:
    """Writes each trial to the journal, and a readable file for each build to ``logs/``."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal = journal
        self._folder = folder / LOGS
        make_folder(self._folder)
        remove_partial(self._folder)  # the previous run may have been killed while writing
        if not journal.entries():  # a new search: logs of an earlier one must not be taken for its own
            for old in self._folder.glob("*.log"):
                old.unlink()

    def trials(self) -> tuple[Trial, ...]:
        """The trials in the journal."""
        return self._journal.trials()

    def append(self, trial: Trial, **more: object) -> None:
        """Append a trial to the journal, then write its log."""
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
    if trial.accuracy is not None:
        lines.append(f"metric     {trial.accuracy:.6g}")
    if race is not None:
        reach = "" if race.interval is None else f" [{race.interval.low:.4f}, {race.interval.high:.4f}]"
        figures = f"{race.ratio:.4f}{reach}, {race.pairs} pairs, p = {race.p_value:.2g}"
        lines.append(f"race       {race.verdict} against {race.opponent}: {figures}")
    for clock, times in (("wall", trial.samples.wall_ms), ("cpu", trial.samples.cpu_ms)):
        if times:
            lines.append(f"{f'{clock} ms':<10} {' '.join(f'{value:.4f}' for value in times)}")
    return "\n".join([*lines, *(["", trial.error] if trial.error else [])]) + "\n"


def _is_finished(path: Path) -> bool:
    """Whether a journal ends with a confirmation, of any case, or comes from the cache."""
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


# ---- the results ----------------------------------------------------------------------------------------


def write_results(prepared: Prepared, result: SearchResult, raw_winner: Placement, folder: Path) -> None:
    """Write reference, tuned and raw tuned model, scheme and layer times; the copy in float32 if candidates are.

    The tuned model of an unchanged result is a copy of the reference. Raises `OutputError` if the folder cannot be
    written.
    """
    with staged(folder, prepared.given) as stage:
        _copy(prepared.given, stage / REFERENCE)
        if prepared.is_converted:
            _copy(prepared.base, stage / FLOAT32_FILE)
        write_placement(prepared, result.winner, stage / MODEL)
        write_placement(prepared, raw_winner, stage / RAW_MODEL)
        write_placed(prepared, result.winner, stage / SCHEME)
        write_text(stage / LAYERS, _csv(_layer_rows(result)))
        if result.front:
            _write_front(prepared, result, stage / FRONT)
        if prepared.case.tune.region_models:
            _write_regions(prepared, result, stage / REGIONS)


def _write_front(prepared: Prepared, result: SearchResult, folder: Path) -> None:
    """Write one model for each placement of the Pareto front, fastest first, and a table of their measurements."""
    make_folder(folder)
    placements = {trial.placement.digest: trial.placement for trial in result.trials}
    rows = [["file", "digest", "pairs", "ratio", "low", "high", "sqnr_db", "accuracy"]]
    for number, point in enumerate(result.front, 1):
        name = f"{number}.onnx"
        write_placement(prepared, placements[point.placement], folder / name)
        figures = (point.ratio.median, point.ratio.low, point.ratio.high, point.sqnr_db)
        accuracy = "" if point.accuracy is None else f"{point.accuracy:.6g}"
        rows.append([name, point.placement, str(point.pairs), *(f"{v:.4f}" for v in figures), accuracy])
    write_text(table_of(folder), _csv(rows))


def _write_regions(prepared: Prepared, result: SearchResult, folder: Path) -> None:
    """Write the best model of each pattern in the order of the search, and a table.

    Beside each model is the command that builds and times it, if the runtime has a tool for that.
    """
    make_folder(folder)
    least = None if result.accuracy is None else result.accuracy.least
    best = best_by_pattern(prepared.space, result.trials, prepared.case.tune.limits.min_sqnr_db, least)
    replay = hooks.declaration_of(prepared.backend.name).replay
    rows = [["file", "digest", "pairs", "won", "ratio", "sqnr_db", "pattern", "instances"]]
    for number, (pattern, trial) in enumerate(best.items(), 1):
        name = f"{number}.onnx"
        write_placement(prepared, trial.placement, folder / name)
        known = [region for region in prepared.regions if region.pattern == pattern]
        figures = [f"{trial.ratio:.4f}", "" if trial.sqnr_db is None else f"{trial.sqnr_db:.4f}"]
        row = [name, trial.placement.digest, str(trial.placement.pairs), str(trial.incumbent).lower()]
        rows.append([*row, *figures, known[0].pattern_text if known else pattern, str(len(known) or 1)])
        command = hooks.load(replay)(prepared.given, name, prepared.options) if replay else ""
        if command:
            write_text(folder / f"{number}.sh", f'cd "$(dirname "$0")" && {command}\n')
    write_text(table_of(folder), _csv(rows))


def _csv(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write_patterns(
    prepared: Prepared, result: SearchResult, confirmed: Mapping[str, Interval], path: Path
) -> None:
    """Write the pattern cache of a search, from which later searches can start.

    Builds of parts of the model are left out, and so are a quantized model as given and placements that were not
    accurate enough.
    """
    least_db = prepared.case.tune.limits.min_sqnr_db
    least = None if result.accuracy is None else result.accuracy.least
    own = (trial for trial in result.trials if not (trial.subgraph or trial.placement.given))
    fit = [trial for trial in own if reaches(trial, least_db, least)]
    winner, built = result.winner, {trial.placement.digest for trial in result.trials if not trial.subgraph}
    if winner.digest not in built:  # only confirmed, not part of the search
        ratio = confirmed[winner.digest].median
        fit.append(Trial(number=len(result.trials), phase="pure", placement=winner, ratio=ratio))
    backend, device = prepared.backend.target, prepared.device.key
    write_cache(path, gather(fit, prepared.space, backend, device, confirmed=confirmed))


def take_results(kept: FinishedSearch, given: Model, folder: Path) -> None:
    """Copy the files of a cached search to the folder of this run; an existing journal is kept."""
    with staged(folder, given) as stage:
        _copy(given, stage / REFERENCE)
        for file in kept.folder.iterdir():
            is_model = file.name.startswith(("tuned", FLOAT32_FILE))
            is_new = file.name == JOURNAL and not (folder / JOURNAL).exists()
            if is_model or is_new or file.name in (SCHEME, PATTERNS, LAYERS):
                shutil.copyfile(file, stage / file.name)
        for name in (FRONT, REGIONS):
            if table_of(kept.folder / name).is_file():
                shutil.copytree(kept.folder / name, stage / name)


def make_folder(folder: Path) -> None:
    """Create the folder if it is missing; raises `OutputError` on failure."""
    with explained("the folder", folder, _CURE):
        folder.mkdir(parents=True, exist_ok=True)


def write_placed(prepared: Prepared, placement: Placement, path: Path) -> None:
    """Write the scheme of a placement, with its numbers."""
    own, backend = prepared.quantized, prepared.backend.target
    if placement.given and own is not None:
        imported, sites = own.imported, Placement(sites=placement.sites)
        write_scheme(path, sites, imported.pairs, backend, factors=imported.equalized)
        return
    write_scheme(
        path,
        placement,
        prepared.numbers.placed(placement),
        backend,
        dq_dtype=prepared.case.quantize.dq_dtype,
        factors=(*branches_of(prepared.folded), *prepared.equalized_for(placement))
        if placement.sites
        else (),
        is_converted=prepared.is_converted and bool(placement.sites),  # without pairs it is the user's model
    )


def write_placement(prepared: Prepared, placement: Placement, path: Path) -> None:
    """Write the model with the pairs of a placement: without pairs a copy of the reference, or the model as given."""
    own = prepared.quantized
    if own is not None and placement.given:
        _copy(own.quantized, path)
        return
    if not placement.sites:
        _copy(prepared.given, path)
        return
    given = require_path(prepared.given)
    with ExitStack() as stack:
        store, base = None, given.parent
        # integer weights of a large model stay on disk until they are written, like those of the given model
        if given.stat().st_size >= LARGE:
            base = stack.enter_context(partial_folder(path.parent))
            store = WeightStore(base, base=given.parent)
        model = equalized(prepared.folded, prepared.equalized_for(placement))
        inserted = Inserter(model, prepared.numbers, store=store).insert(placement)
        for note in inserted.notes:
            prepared.note_once(note)
        save_model(inserted.parts, path, inputs=[given], base=base)


def _copy(given: Model, path: Path) -> None:
    own = require_path(given)
    save_model(given.proto, path, inputs=[own], base=own.parent)


def profiles_of(trials: tuple[Trial, ...], winner: Placement) -> dict[str, tuple[LayerTime, ...]]:
    """The kernels of the reference and, if it was built whole, of the selected model, in their first build."""
    found = {"reference": trials[0].layers}
    whole = [t for t in trials if t.placement.digest == winner.digest and not t.subgraph]
    shipped = next((t for t in whole if t.layers), next(iter(whole), None))
    return found if shipped is None else found | {"tuned": shipped.layers}


def _layer_rows(result: SearchResult) -> Iterator[list[str]]:
    """Kernel times of the selected model and of the one without pairs, as profiled in their first build."""
    names = {"reference": FLOAT32} if result.converted_from else {}
    yield ["model", "kernel", "op_type", "milliseconds", "nodes", "tensors", "boundary", "integer"]
    for role, layers in profiles_of(result.trials, result.winner).items():
        for layer in layers:
            what = [names.get(role, role), layer.name, layer.op_type, f"{layer.milliseconds:.6f}"]
            places = [" ".join(layer.nodes), " ".join(layer.tensors)]
            yield [*what, *places, str(layer.boundary).lower(), str(layer.integer).lower()]


# ---- all at once ----------------------------------------------------------------------------------------


@contextmanager
def staged(folder: Path, given: Model) -> Iterator[Path]:
    """A folder to write results to; they are moved to ``folder`` at the end, unless an error occurs.

    All files of a result appear together, never mixed with those of an earlier one: they are written to a hidden folder
    and moved out when the last one is complete. ``result.json``, which reports write after everything else, is removed
    before the first one moves: if it exists, the files beside it belong to it.

    Raises `OutputError` if they cannot be written, or would overwrite the model ``given``. It names the final file.
    """
    try:
        with explained("the results", folder, _CURE), partial_folder(folder) as stage:
            yield stage
            _move_out(stage, folder, given)
    except OutputError as error:
        hidden = Path(error.where or folder)
        where = folder / hidden.name if folder in hidden.parents else hidden
        raise OutputError(error.what, where=where, cure=error.cure) from None


def refuse_own(folder: Path, names: Iterable[Path | str], given: Model) -> None:
    """Raise `OutputError` if files of these names in ``folder`` would overwrite the given model or its weights."""
    own = given.user_files
    for name in names:
        refuse_overwriting(folder / name, own)
        refuse_overwriting(_weights_of(folder / name), own)


def _move_out(stage: Path, folder: Path, given: Model) -> None:
    files = [path.relative_to(stage) for path in sorted(stage.rglob("*")) if path.is_file()]
    refuse_own(folder, files, given)
    (folder / RESULT).unlink(missing_ok=True)
    for models in (folder / FRONT, folder / REGIONS):
        _remove_models(models, given)
    for name in files:  # a model must never be read with the weights of another one
        if _weights_of(folder / name).exists():
            (folder / name).unlink(missing_ok=True)
            _weights_of(folder / name).unlink()
    for name in sorted(files, key=lambda name: name.suffix != ".data"):
        (folder / name.parent).mkdir(exist_ok=True)
        (stage / name).replace(folder / name)


def _remove_models(folder: Path, given: Model) -> None:
    """Remove the models of an earlier search, which may be more than those of the new one. The table lists them."""
    table = table_of(folder)
    if not table.is_file():
        return
    lines = table.read_text(encoding="utf-8", errors="replace").splitlines()
    numbers = {line.partition(".")[0] for line in lines}
    models = [
        f for f in folder.iterdir() if _NUMBERED.fullmatch(f.name) and f.name.partition(".")[0] in numbers
    ]
    own = {path.resolve() for path in given.user_files}
    for file in (*models, table):
        if file.resolve() not in own:
            file.unlink(missing_ok=True)
    with suppress(OSError):  # the folder also holds files of the user
        folder.rmdir()


def _weights_of(model: Path) -> Path:
    return model.with_name(model.name + ".data")
