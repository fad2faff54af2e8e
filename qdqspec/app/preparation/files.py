"""Model files of a case: candidates that are built, and results."""

from __future__ import annotations

import csv
import hashlib
import io
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import onnx

from qdqspec._core import hooks
from qdqspec._core.files import OTHER_FOLDER, RESULT, PartialFolder, explained, refuse_overwriting, write_text
from qdqspec._core.units import cell_text
from qdqspec.app.preparation.prepare import Prepared
from qdqspec.app.preparation.runtimes import write_half
from qdqspec.app.preparation.stored import (
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
    make_folder,
    table_of,
)
from qdqspec.errors import BackendError, ModelError, OutputError, PlacementError
from qdqspec.graph import Model, WeightStore, require_path, save_model
from qdqspec.graph.ops import has_floats
from qdqspec.qdq import (
    Excerpts,
    Inserter,
    PatternCache,
    SchemeFile,
    branches_of,
    equalized,
)
from qdqspec.search import best_by_pattern
from qdqspec.timing import Load
from qdqspec.types import FLOAT32, Interval, LayerTime, Placement, SearchResult, Trial

Nodes = tuple[str, ...]


class CandidateFiles:
    """Writes placements of a case as files to one folder: whole models, and parts. Weights are written once."""

    def __init__(self, prepared: Prepared, folder: Path) -> None:
        self._prepared, self._folder = prepared, folder
        self._store = WeightStore(folder, base=require_path(prepared.given).parent)
        self._inserter = Inserter(prepared.model, prepared.numbers, store=self._store)
        self._plain = plain_file(prepared, folder)
        self._last: tuple[Nodes, Callable[[Placement], onnx.ModelProto], Load] | None = None

    def whole(self, placement: Placement) -> Path:
        """The file of a placement; without pairs that of the model to compare with, or the user's quantized model."""
        if not placement.sites:
            return self._plain
        if placement.given and self._prepared.quantized is not None:
            return require_path(self._prepared.quantized.quantized)
        path = self._folder / f"{placement.digest}.onnx"
        if not path.exists():
            save_model(self._inserter.insert(self._prepared.space.permitted(placement)).proto, path)
        return path

    def part(self, placement: Placement, nodes: Nodes) -> tuple[Path, Load]:
        """The file of a part with the pairs of a placement in it, and inputs for it of the first shape profile.

        Raises `BackendError` if it cannot be built in isolation, and `PlacementError` for pairs that the spec forbids.
        """
        prepared = self._prepared
        prepared.space.permitted(placement)
        digest = hashlib.sha256("\n".join(nodes).encode()).hexdigest()[:12]
        path = self._folder / f"part-{digest}-{placement.digest}.onnx"
        try:
            if self._last is None or self._last[0] != nodes:
                self._last = nodes, *self._cut(nodes)
            _, insert, load = self._last
            if not path.exists():
                save_model(insert(placement), path)
        except (ModelError, PlacementError) as error:
            raise BackendError(f"these nodes cannot be built alone: {error.what}") from None
        return path, load

    def _cut(self, nodes: Nodes) -> tuple[Callable[[Placement], onnx.ModelProto], Load]:
        """A function that gives these nodes as a model with the pairs of a placement, and inputs for it."""
        prepared = self._prepared
        first, tensors = prepared.loads[0], list(self._excerpts.inputs(nodes))
        (values,) = prepared.values_of(prepared.model, tensors, [first.feeds])
        if missing := [tensor for tensor in tensors if tensor not in values]:
            raise BackendError(f"no run of the model returns '{missing[0]}'")
        excerpt = self._excerpts.cut(nodes, values)
        inserter = Inserter(excerpt.model, prepared.numbers, store=self._store)
        load = replace(first, feeds={name: values[name] for name in excerpt.inputs}, share=1.0)
        return lambda placement: inserter.insert(excerpt.restricted(placement)).proto, load

    @cached_property
    def _excerpts(self) -> Excerpts:
        prepared = self._prepared
        return Excerpts(prepared.model, prepared.data.shapes, require_path(prepared.given))


def plain_file(prepared: Prepared, folder: Path) -> Path:
    """The file of a candidate without pairs: the user's model, or its copy in float32, written to a folder."""
    if not prepared.converted_from:
        return require_path(prepared.given)
    return copy_model(prepared.base, folder / FLOAT32_FILE)


def copy_model(model: Model, path: Path) -> Path:
    """Write a model to another file."""
    own = require_path(model)
    save_model(model.proto, path, inputs=[own], base=own.parent)
    return path


def half_reference(prepared: Prepared, folder: Path) -> dict[str, Path]:
    """The model in float16, written to a folder, by its role; empty if not requested or without floats.

    Inputs and outputs keep their types, so that all roles have the same inputs. Outputs are not compared: a model whose
    values exceed the range of float16 has to be converted with data (AutoCast of Model-Optimizer does so).
    """
    given, asked, able = prepared.given, prepared.case.tune.float16, prepared.capabilities.computes_in_half
    if not (able if asked is None else asked) or not has_floats(given):
        return {}
    if not able:
        prepared.note_once(
            "float16 was requested, and this backend has few float16 kernels: float32 casts were inserted"
        )
    try:
        path = folder / "reference_float16.onnx"
        return {"float16": write_half(given, path, prepared.backend.name, keep_io=True)}
    except ModelError as error:
        prepared.note_once(f"no float16 reference: {error.what}")
        return {}


def write_results(prepared: Prepared, result: SearchResult, raw_winner: Placement, folder: Path) -> None:
    """Write reference, tuned and raw tuned model, scheme and layer times; the copy in float32 if candidates are.

    The tuned model of an unchanged result is a copy of the reference. Raises `OutputError` on failure.
    """
    with staged(folder, prepared.given) as stage:
        copy_model(prepared.given, stage / REFERENCE)
        if prepared.converted_from:
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
    fit = [trial for trial in own if trial.reaches(least_db, least)]
    winner, built = result.winner, {trial.placement.digest for trial in result.trials if not trial.subgraph}
    if winner.digest not in built:  # only confirmed, not part of the search
        ratio = confirmed[winner.digest].median
        fit.append(Trial(number=len(result.trials), phase="pure", placement=winner, ratio=ratio))
    backend, device = prepared.backend.target, prepared.resources.device.key
    cache = PatternCache.gather(fit, prepared.space, backend, device, confirmed=confirmed)
    write_text(path, cache.text())


def take_results(kept: FinishedSearch, given: Model, folder: Path) -> None:
    """Copy the files of a cached search to the folder of this run; an existing journal is kept."""
    with staged(folder, given) as stage:
        copy_model(given, stage / REFERENCE)
        copy_results(kept.folder, stage)
        if not (folder / JOURNAL).exists():
            shutil.copyfile(kept.folder / JOURNAL, stage / JOURNAL)


def write_placed(prepared: Prepared, placement: Placement, path: Path) -> None:
    """Write the scheme of a placement, with its numbers."""
    own, backend, has_pairs = prepared.quantized, prepared.backend.target, bool(placement.sites)
    if placement.given and own is not None:
        imported = own.imported
        SchemeFile(backend=backend, pairs=imported.pairs, equalized=imported.equalized).write(path)
        return
    factors = (
        (*branches_of(prepared.folded).values(), *prepared.equalized_for(placement)) if has_pairs else ()
    )
    SchemeFile(
        backend=backend,
        pairs=prepared.numbers.placed(placement),
        equalized=factors,
        dq_dtype=prepared.case.quantize.dq_dtype,
        # without pairs it is the user's model
        converted_from=(prepared.converted_from or None) if has_pairs else None,
    ).write(path)


def write_placement(prepared: Prepared, placement: Placement, path: Path) -> None:
    """Write the model with the pairs of a placement: without pairs a copy of the reference, or the model as given."""
    own = prepared.quantized if placement.given else None
    if own is not None or not placement.sites:
        copy_model(prepared.given if own is None else own.quantized, path)
        return
    given = require_path(prepared.given)
    with ExitStack() as stack:
        store, base = None, given.parent
        # integer weights of a large model stay on disk until they are written, like those of the given model
        if prepared.given.is_large:
            base = stack.enter_context(PartialFolder(path.parent))
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
            name, op_type = cell_text(layer.name), cell_text(layer.op_type)
            what = [names.get(role, role), name, op_type, f"{layer.milliseconds:.6f}"]
            places = [cell_text(" ".join(each)) for each in (layer.nodes, layer.tensors)]
            yield [*what, *places, str(layer.boundary).lower(), str(layer.integer).lower()]


@contextmanager
def staged(folder: Path, given: Model) -> Iterator[Path]:
    """A folder to write results to; all are moved to ``folder`` together at the end, unless an error occurs.

    ``result.json``, which reports write after everything else, is removed first: if it exists, the files beside it
    belong to it. Raises `OutputError`, which names the final file, if files cannot be written or would overwrite the
    model ``given``.
    """
    try:
        with explained("the results", folder, OTHER_FOLDER), PartialFolder(folder) as stage:
            yield stage
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
