"""Command ``explain``: compare two engines layer by layer, in the node names of the ONNX model."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec._core.config import BUILD_OPTIONS, find_folder
from qdqspec._core.files import RESULT
from qdqspec._core.units import proved_text
from qdqspec.app.cases import find_case, is_spec
from qdqspec.app.cli.command import (
    answer,
    argument,
    at_least_one,
    input_options,
    inputs_given,
    model_given,
    refuse_options,
    settings_from,
    switch,
    values_left,
    verb,
)
from qdqspec.app.cli.models import judged
from qdqspec.errors import BackendError, ConfigError, QdqspecError, StateError
from qdqspec.types import Case, DefinitionEvidence, Inputs

if TYPE_CHECKING:
    from qdqspec._core.config import Settings
    from qdqspec.app.evidence.explained import ExplainedEngine
    from qdqspec.graph import Model, Node
    from qdqspec.qdq import SchemeFile
    from qdqspec.types import Clock, Evidence, SearchResult, Trial

_GRAPH = ".graph.json"
_EXPLAINED = (
    "name a case (spec::case or its folder), a model (.onnx), or exported layer information (.json, .log)"
)
_RECURRENT = frozenset({"GRU", "LSTM", "RNN"})
_JOURNAL, _SCHEME, _REFERENCE = "trials.jsonl", "scheme.json", "reference.onnx"


@verb(
    "explain",
    "qdqspec explain reports/squeezenet/default\n  qdqspec explain model.onnx tuned.onnx\n"
    "  qdqspec explain fp16.graph.json qat.graph.json",
    argument("what", "WHAT", nargs="+"),
    argument("--reference", "ORIGINAL", "Profile a MODEL against this model instead.", type=Path),
    argument("--layers", "N", "Differences that are shown (default: 12).", type=at_least_one, default=12),
    switch(
        "--culprits",
        "List instead the Q/DQ pairs of a case or MODEL that cost most accuracy, and the SQNR without them.",
    ),
    *input_options(data="Inputs to run the models with (default: those of the spec, else random)."),
    options=("backend", "device", "threads", "seed", *BUILD_OPTIONS),
)
def explain(arguments: argparse.Namespace) -> int:
    """Explain why a placement is faster or slower: time by layer, precision, lost fusions. WHAT is a case whose results
    exist (its folder, or spec::case), a model, which is profiled against itself without Q/DQ, MODEL TUNED (the same as
    TUNED --reference MODEL), or layer information that a tool of the runtime exported: GRAPH[,PROFILE[,TIMES]]; beside
    NAME.graph.json, NAME.profile.json, NAME.times.json and NAME.profile.metadata.json are found. Several of these are
    compared with the reference. Layer information without times, or the log of a build with its list of kernels, is
    described by counts.
    """
    what, models = arguments.what, [word for word in arguments.what if word.endswith(".onnx")]
    if models and len(what) > 1:  # ``MODEL TUNED`` is ``TUNED --reference MODEL``
        if len(what) != 2 or len(models) != 2 or arguments.reference is not None:
            raise ConfigError(
                "a model is explained alone, or with its original before it",
                cure="qdqspec explain MODEL TUNED; rank exported layer information without models",
            )
        arguments.reference, arguments.what = Path(models[0]), models[1:]
    if not models:
        refuse_options(arguments, "reference", "a model")
    if arguments.culprits:
        return explain_culprits(arguments)
    from qdqspec.app.report.explain_text import explain_json, explain_text

    settings, search = settings_from(arguments), None
    first, given = arguments.what[0], partial(inputs_given, arguments=arguments, values=arguments.values)
    if len(arguments.what) == 1 and models:
        engines = _from_model(Path(first), arguments.reference, given(Inputs()), settings)
    elif len(arguments.what) == 1 and (Path(first).is_dir() or is_spec(Path(first.partition("::")[0]))):
        case, folder = _find_results(first, settings, RESULT)
        own = case.inputs if arguments.data is None else replace(case.inputs, calibration=None)
        engines, search = _from_folder(folder, given(own), settings)
    else:
        refuse_options(arguments, "shapes data values", "models that are run")
        engines = _from_files(arguments.what)
    text = explain_text(engines, most=arguments.layers, search=search)
    return answer(arguments, explain_json(engines, search), text)


def _find_results(what: str, settings: Settings, needed: str) -> tuple[Case, Path]:
    """The case of a spec, or of the results in a folder, and the folder.

    Raises `StateError` if the folder does not have the file ``needed``.
    """
    case, folder = None, Path(what).absolute()
    cure = "name a case, the folder that a run left, or a model"
    if is_spec(Path(what.partition("::")[0])):
        case = find_case(what, settings, Path.cwd())
        folder, cure = find_folder(settings, case), f"run it once: pytest {what}"
    if not (folder / needed).is_file():
        of = "" if case is None else f" of {case.name}"
        raise StateError(f"there are no results{of} yet", where=folder, cure=cure)
    return case or _case_of(folder, settings), folder


def _case_of(folder: Path, settings: Settings) -> Case:
    """The case of the spec that results are of, which has the data; without it, the reference at its shapes.

    The spec must have the same model now.
    """
    from qdqspec.app.report.record import read_case

    inputs = Inputs()
    with suppress(QdqspecError):
        found = read_case(folder).evidence
        inputs = replace(inputs, profiles=found.profiles or inputs.profiles)
        if found.case.spec is not None:
            case = find_case(f"{found.case.spec}::{found.case.id}", settings, Path.cwd())
            if model_given(case.model, case.inputs.values).sha256 == found.model_sha256:
                return case
    return Case(id="default", model=folder / _REFERENCE, inputs=inputs)


# ---- exported engines ---------------------------------------------------------------------------


def _from_files(what: Sequence[str]) -> list[ExplainedEngine]:
    """The engines in files of a runtime's tool; each of the first backend that can read its files.

    They are named after the files, without the common parts of the names: ``fp16``, ``qat``. Raises `ConfigError` for a
    missing file, and for a binary one, which is no layer information.
    """
    from qdqspec._core import hooks
    from qdqspec.app.evidence.explained import ExplainedEngine

    paths = [[Path(part) for part in word.split(",") if part] or [Path(word)] for word in what]
    for path in (path for parts in paths for path in parts):
        if not path.is_file():
            raise ConfigError("there is no such file or folder", where=path, cure=_EXPLAINED)
        with path.open("rb") as file:
            if b"\x00" in (head := file.read(64)) or head.startswith(b"PK"):
                raise ConfigError("this is nothing that can be explained", where=path, cure=_EXPLAINED)
    names = [parts[0].name.removesuffix(_GRAPH).removesuffix(".json") for parts in paths]
    if len(set(names)) < len(names):
        names = [str(parts[0]) for parts in paths]
    elif len(names) > 1:
        common = os.path.commonprefix(names)  # noqa: RUF071 - names, not paths
        cut = max(map(common.rfind, "-_.")) + 1
        names = [name[cut:] or name for name in names]
    engines = []
    for name, parts in zip(names, paths, strict=True):
        refusal: BackendError | None = None
        for read in hooks.readers("exported"):
            try:
                found = read(parts[:3])
            except BackendError as error:
                refusal = refusal or error
                continue
            break
        else:
            assert refusal is not None, "some backend reads exported engines"
            raise refusal
        notes = () if found.has_times else (f"{name} has no profile: give one with GRAPH,PROFILE",)
        engine = ExplainedEngine(
            name=name, layers=found.layers, end_to_end_ms=found.end_to_end_ms, notes=notes
        )
        engines.append(engine)
    return engines


# ---- results of a run ---------------------------------------------------------------------------


def _from_folder(
    folder: Path, inputs: Inputs, settings: Settings
) -> tuple[list[ExplainedEngine], SearchResult | None]:
    """Reference and tuned model of a run's folder.

    Of an unchanged case, the candidates that were not selected are compared with the reference.
    """
    from qdqspec.app.report.record import read_case

    record = read_case(folder)
    found, settings = record.evidence, replace(settings, backend=record.evidence.backend)
    search = found.search
    if search is None and not (folder / "tuned.onnx").is_file():
        first = next((result.verdict.headline for result in record.results), "its run was not completed")
        raise StateError(
            f"nothing was searched for this case: {first}",
            where=folder,
            cure="correct that, and run it again",
        )
    corrections = () if search is None else search.corrections
    engines = _engines_of_run(found, folder, inputs, settings)
    last, parity = engines[-1], found.parity
    differs = (
        () if parity is None else _differing(parity.definition, settings, "the given model", parity.data)
    )
    noted = _note_types(folder / _REFERENCE, folder / "tuned.onnx", settings)
    notes = (*last.notes, *differs, *noted)
    return [*engines[:-1], replace(last, notes=notes, corrections=corrections)], search


def _engines_of_run(
    found: Evidence, folder: Path, inputs: Inputs, settings: Settings
) -> list[ExplainedEngine]:
    """The profiles taken by the search, with the end-to-end times of the run, which the table of the run has too.

    Of an unchanged case these are the reference and two of the candidates that were not selected. If the search did not
    profile both models, they are profiled now. If candidates were converted to another float type, no trial is the
    reference.
    """
    from qdqspec.app.evidence.builds import engine_of

    search, latency = found.search, found.latency
    profiled: dict[str, Trial] = {}
    if search is not None and not search.converted_from:
        for trial in _read_trials(folder / _JOURNAL):
            if trial.layers and not trial.subgraph:
                profiled.setdefault(trial.placement.digest, trial)
    reference = next((trial for trial in profiled.values() if not trial.placement.sites), None)

    def of_trial(role: str, trial: Trial) -> ExplainedEngine:
        engine = engine_of(role, trial.placement, trial.layers, found.node_ops)
        return replace(engine, notes=trial.samples.notes)

    rejected = [] if search is None else [one for one in search.rejected if one.placement in profiled]
    if reference is not None and rejected and latency is not None:
        reference_ms = latency.median_ms("reference")
        engines = [replace(of_trial("reference", reference), end_to_end_ms=reference_ms)]
        for one in rejected[:2]:
            engine = of_trial(one.role, profiled[one.placement])
            end_to_end_ms = reference_ms * one.ratio.median
            engines.append(replace(engine, end_to_end_ms=end_to_end_ms, speedup=one.ratio.inverse))
        return engines
    tuned = None if search is None else profiled.get(search.winner.digest)
    if reference is None or tuned is None:
        files = {role: folder / f"{role}.onnx" for role in ("reference", "tuned")}
        before, after = _profile_models(files, inputs, settings)
    else:
        before, after = of_trial("reference", reference), of_trial("tuned", tuned)
    if latency is None:
        return [before, after]
    before, after = (replace(one, end_to_end_ms=latency.median_ms(one.name)) for one in (before, after))
    return [before, replace(after, speedup=latency.speedup, proved=proved_text(latency, found.min_gain))]


def _read_trials(path: Path) -> Iterator[Trial]:
    """The readable trials of a journal; another process may be writing the last line."""
    from qdqspec.search import trial_from_json

    if not path.is_file():
        return
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                with suppress(ValueError, RecursionError):
                    yield trial_from_json(json.loads(line))
    except OSError as error:
        raise StateError(f"it cannot be read: {error.strerror}", where=path, cure="check the path") from None


# ---- models -------------------------------------------------------------------------------------


def _from_model(
    path: Path, reference: Path | None, inputs: Inputs, settings: Settings
) -> list[ExplainedEngine]:
    """A quantized model and its float form, or a float model alone."""
    from qdqspec.graph import require_path
    from qdqspec.graph.ops import QDQ_OPS
    from qdqspec.qdq import with_pairs

    with _with_float_form(path, reference, inputs) as (model, _, file, notes):
        tuned = require_path(model)
        if reference is None and not any(node.op_type in QDQ_OPS for node in with_pairs(model).nodes):
            if notes:  # a name that is no input: nothing was fixed when a float model was made
                model_given(path, inputs.values)
            (engine,) = _profile_models({path.stem: tuned}, inputs, settings)
            about = judged(model, settings).note
            return [replace(engine, notes=(*engine.notes, *notes, *filter(None, [about])))]
        # the user's file first: an error of both is that of its path
        engine, first = _profile_models({"tuned": tuned, "reference": file}, inputs, settings)
        return [first, replace(engine, notes=(*engine.notes, *notes, *_note_types(file, tuned, settings)))]


@contextmanager
def _with_float_form(
    path: Path, reference: Path | None, inputs: Inputs
) -> Iterator[tuple[Model, Model | None, Path, tuple[str, ...]]]:
    """A quantized model, its original if given, the file of its float form, and notes.

    The float form is the original, or a temporary copy without pairs. Raises `ModelError` if shapes are missing.
    """
    from qdqspec._core.files import TemporaryFolder
    from qdqspec.accuracy import CaseData
    from qdqspec.graph import require_path, save_model
    from qdqspec.qdq import strip_qdq

    left, notes = values_left(path, inputs.values)
    model = model_given(path, left)
    if reference is not None:
        # a model with inputs fixed has a temporary file, which exists as long as the object
        original = model_given(reference, inputs.values)
        yield model, original, require_path(original), ()
        return
    _ = CaseData(model, inputs).shaped().shapes  # before the copy, so that an error names the user's file
    with TemporaryFolder() as folder:
        stripped = folder / _REFERENCE
        save_model(strip_qdq(model).proto, stripped, inputs=model.user_files, base=require_path(model).parent)
        yield model, None, stripped, notes


def _note_types(reference: Path, tuned: Path, settings: Settings) -> tuple[str, ...]:
    """Notes on a model that was converted from the float16 of its reference to float32, and on recurrent operators
    without an integer kernel.
    """
    from qdqspec.graph import load_model

    if not reference.is_file():
        return ()
    model, notes = load_model(reference), []
    if tuned.is_file() and load_model(tuned).converted_from and model.float16_nodes:
        notes.append(
            "the reference computes in float16, and the tuned model in float32, with casts at its float16 inputs and "
            "outputs: differences include those of the type"
        )
    recurrent = [node.name for node in model.nodes if node.op_type in _RECURRENT]
    reasons = judged(model, settings).reasons if recurrent else {}
    return (*notes, *(f"{name} has no label: {why}" for name in recurrent if (why := reasons.get(name))))


def _profile_models(models: Mapping[str, Path], inputs: Inputs, settings: Settings) -> list[ExplainedEngine]:
    from qdqspec.app.evidence.timing import profile_models
    from qdqspec.backends import BuildOptions, Isolated
    from qdqspec.graph import load_model
    from qdqspec.graph.ops import QDQ_OPS

    def reads_pair(model: Model, node: Node) -> bool:
        """Whether a node reads a dequantized activation."""
        makers = (model.producer.get(tensor) for tensor in node.inputs)
        dequantized = (one for one in makers if one is not None and one.op_type == "DequantizeLinear")
        return node.op_type not in QDQ_OPS and any(
            one.inputs[0] not in model.constants for one in dequantized
        )

    loaded = {name: load_model(path) for name, path in models.items()}
    ops = {node.name: node.op_type for model in loaded.values() for node in model.nodes}
    with closing(Isolated(settings.backend)) as backend:
        options = BuildOptions.of(settings)
        availability = backend.probe(options)
        if not availability.usable:
            raise availability.error(settings.backend)
        clock: Clock = "cpu" if settings.threads == 1 else "wall"
        found = profile_models(models, backend, options, inputs, clock=clock, seed=settings.seed)
    data = "the given" if inputs.calibration or inputs.evaluation else "random"
    return [
        replace(
            engine,
            ops=ops,
            quantized=frozenset(node.name for node in loaded[name].nodes if reads_pair(loaded[name], node)),
            notes=(*engine.notes, *_differing(definition, settings, f"the {name} model", data)),
        )
        for name, (engine, definition) in found.items()
    ]


def _differing(
    found: DefinitionEvidence | None, settings: Settings, model: str, data: str
) -> tuple[str, ...]:
    """A note on a model that the backend computes otherwise than ONNX defines it."""
    from qdqspec.app.preparation.runtimes import difference_text

    if found is None or found.holds:
        return ()
    return (difference_text(found, settings.backend, model, data),)


# ---- pairs ranked by their error ----------------------------------------------------------------


def explain_culprits(arguments: argparse.Namespace) -> int:
    """Rank the pairs and print them."""
    from qdqspec.app.evidence.parity import culprits_of
    from qdqspec.app.report.culprits import culprits_json, culprits_text
    from qdqspec.app.session import Session

    if len(arguments.what) > 1:
        raise ConfigError("the pairs of one model are ranked at a time", cure="name one case or model")
    settings = settings_from(arguments)
    with _meant(arguments, settings) as (case, placed, quantized, notes), Session(settings) as session:
        most = None if arguments.json else arguments.layers
        setup = session.work(case).prepared
        found = culprits_of(setup, placed, quantized=quantized, most=most)
        notes = (*notes, *setup.warnings)
    text = "\n\n".join((culprits_text(found), *(f"note: {note}" for note in notes)))
    return answer(arguments, {**culprits_json(found), "notes": list(notes)}, text)


@contextmanager
def _meant(
    arguments: argparse.Namespace, settings: Settings
) -> Iterator[tuple[Case, SchemeFile, Model | None, tuple[str, ...]]]:
    """The float model with its data, as a case, the pairs placed in it, the model that they come from, and notes."""
    from qdqspec.qdq import SchemeFile, import_placement

    (what,) = arguments.what
    if what.endswith(".onnx"):
        values, inputs = arguments.values, inputs_given(Inputs(), arguments)
        with _with_float_form(
            Path(what), arguments.reference, replace(inputs, values={**(values or {})})
        ) as (model, original, file, notes):
            imported = import_placement(model, original)
            # a stripped model has no input that was fixed when it was made
            own = inputs if original is None else inputs_given(Inputs(), arguments, values)
            notes = (*notes, *imported.notes, *imported.unlike)
            yield Case(id="default", model=file.absolute(), inputs=own), imported, model, notes
        return
    case, folder = _find_results(what, settings, _SCHEME)
    fixed, notes = arguments.values, ()
    if case.spec is None:
        fixed, notes = values_left(case.model, fixed)
    case = replace(case, inputs=inputs_given(case.inputs, arguments, fixed))
    yield case, SchemeFile.read(folder / _SCHEME), None, notes
