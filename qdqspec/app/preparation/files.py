"""The files of a result: put into their folder all at once, and never over files of the user."""

from __future__ import annotations

import csv
import io
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from qdqspec._core import hooks
from qdqspec._core.files import RESULT, explained, partial_folder
from qdqspec.app.preparation.cached import (
    FLOAT32_FILE,
    FRONT,
    JOURNAL,
    LAYERS,
    MODEL,
    RAW_MODEL,
    REFERENCE,
    REGIONS,
    SCHEME,
    FinishedSearch,
    copy_results,
    table_of,
)
from qdqspec.app.preparation.candidates import copy_model
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.errors import OutputError
from qdqspec.graph.model import Model, require_path
from qdqspec.graph.storage import LARGE, WeightStore, refuse_overwriting, save_model, write_text
from qdqspec.qdq.equalize import branches_of, equalized
from qdqspec.qdq.insert import Inserter
from qdqspec.qdq.pattern_cache import gather, write_cache
from qdqspec.qdq.scheme_file import write_scheme
from qdqspec.search.select import reaches
from qdqspec.search.strategies.region import best_by_pattern
from qdqspec.types import FLOAT32, Interval, LayerTime, Placement, SearchResult, Trial

_CURE = "choose another output folder: --qdq-output DIR of pytest, -o DIR of a verb"


def write_results(prepared: Prepared, result: SearchResult, raw_winner: Placement, folder: Path) -> None:
    """Write reference, tuned and raw tuned model, scheme and layer times; the copy in float32 if candidates are.

    The tuned model of an unchanged result is a copy of the reference. Raises `OutputError` on failure.
    """
    with staged(folder, prepared.given) as stage:
        copy_model(prepared.given, stage / REFERENCE)
        if prepared.is_converted:
            copy_model(prepared.base, stage / FLOAT32_FILE)
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
    """Write the best model of each pattern, each with the runtime's command to time it if there is one, and a table."""
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

    It has whole models that the search has placed itself, and that were accurate enough.
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
        copy_model(given, stage / REFERENCE)
        copy_results(kept.folder, stage)
        if not (folder / JOURNAL).exists():
            shutil.copyfile(kept.folder / JOURNAL, stage / JOURNAL)


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
        copy_model(own.quantized, path)
        return
    if not placement.sites:
        copy_model(prepared.given, path)
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
        save_model(inserted.proto, path, inputs=[given], base=base)


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


def make_folder(folder: Path) -> None:
    """Create the folder if it is missing; raises `OutputError` on failure."""
    with explained("the folder", folder, _CURE):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def staged(folder: Path, given: Model) -> Iterator[Path]:
    """A folder to write results to; all are moved to ``folder`` together at the end, unless an error occurs.

    ``result.json``, which reports write after everything else, is removed first: if it exists, the files beside it
    belong to it. Raises `OutputError`, which names the final file, if files cannot be written or would overwrite the
    model ``given``.
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
    numbers = [number for line in lines if (number := line.partition(".")[0]).isdecimal()]
    models = [folder / f"{number}{suffix}" for number in numbers for suffix in (".onnx", ".onnx.data", ".sh")]
    own = {path.resolve() for path in given.user_files}
    for file in (*models, table):
        if file.resolve() not in own:
            file.unlink(missing_ok=True)
    with suppress(OSError):  # the folder also holds files of the user
        folder.rmdir()


def _weights_of(model: Path) -> Path:
    return model.with_name(model.name + ".data")
