"""Command ``init``: write a commented spec for a model, with its inputs, data, and settings that fit this machine."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec import __version__
from qdqspec._core.config import Settings, flags_given
from qdqspec._core.files import create_file, unwritable
from qdqspec._core.hooks import declaration_of
from qdqspec._core.units import count_text, plain
from qdqspec.app.cases import SPEC_SUFFIXES
from qdqspec.app.cli.arguments import MODEL, argument, output, settings_from, verb
from qdqspec.app.cli.models import judged
from qdqspec.app.cli.output import conclude
from qdqspec.errors import ConfigError, OutputError, QdqspecError
from qdqspec.types import TIMED_TRIALS, Inputs, InputShape, QuantizeRules

if TYPE_CHECKING:
    from qdqspec.accuracy.data import Dataset
    from qdqspec.backends.base import Backend, Capabilities
    from qdqspec.graph.model import Model
    from qdqspec.graph.regions.inspect import Judged

_IMAGE, _SEQUENCE, _SOUND, _OTHER = 224, 128, 16000, 16  # guesses for dimensions that a model leaves open
_FLOATS = frozenset({"float", "double", "float16", "bfloat16"})
_OF_SOUND = re.compile("sample|audio|sound|wav")
_OPS = 12  # whose counts are shown
_REASONS = 3  # shown for operators that stay float
_FORMATS = 3  # beside the usual one, that are named
_CALIBRATION, _EVALUATION = re.compile("calib|train"), re.compile("eval|val|test")
_MANY = 4  # more files than this without telling names are one data set
_SAFE = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})  # not text for some YAML
_OF_COURSE = re.compile("^Constant:|quantized together with|folded into|from shapes or constants")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDraft:
    """An input of a model. ``shape`` is the proposal of the spec, ``open_dims`` the dimensions that are not fixed.

    ``from_data``: data fixed the open dimensions. ``span``: the range of shapes in the data.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    open_dims: tuple[int, ...] = ()
    from_data: bool = False
    span: InputShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDraft:
    """Data that fits the model, as written in the spec. ``metric`` is a built-in one that its labels fit."""

    calibration: str = ""
    evaluation: str = ""
    labelled: bool = False
    metric: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether one data set is used for both."""
        return bool(self.calibration) and self.calibration == self.evaluation


@verb(
    "init",
    "qdqspec init models/net.onnx --data data/ -o specs/net.qdq.yaml",
    MODEL,
    output(
        "SPEC",
        "The spec to write; missing folders are created (default: <model>.qdq.yaml, here).",
        required=False,
    ),
    argument(
        "--data --evaluation",
        "PATH",
        "A data file, or a folder that is searched for data of the model.",
        type=Path,
    ),
    options=("backend", "device", "backend-option", "allow-path"),
)
def init(arguments: argparse.Namespace) -> int:
    """Write a commented spec for a model and this machine.

    An existing file is never overwritten.
    """
    from qdqspec.accuracy.data import shaped_by_data
    from qdqspec.graph.given import cautions
    from qdqspec.graph.model import load_model

    settings, path = settings_from(arguments), arguments.output
    if path is None:
        path = Path(arguments.model.name.removesuffix(".onnx").removesuffix(".qdq") + SPEC_SUFFIXES[0])
    elif not path.name.endswith(SPEC_SUFFIXES):
        cure = f"call it {path.stem}{SPEC_SUFFIXES[0]}"
        raise ConfigError("pytest collects a spec by its ending", where=path, cure=cure)
    model = load_model(arguments.model)
    data, inputs, remarks = DataDraft(), Inputs(), list[str]()
    if arguments.data is not None:
        data, inputs, remarks = find_data(arguments.data, model, path.absolute().parent)
    known = shaped_by_data(model, inputs).profiles[0].shapes
    proposed = _unify_named_dims(
        model, [_propose_input(model, name, known.get(name)) for name in model.inputs]
    )
    warned = list(cautions(model))
    is_chosen = flags_given(vars(arguments)).get("backend") is not None
    text = _spec_text(model, path, settings, data, proposed, warned, is_chosen=is_chosen)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_file(path, text)
    except FileExistsError:
        raise OutputError(
            "this spec exists already, and is not overwritten", where=path, cure="name another file with -o"
        ) from None
    except OSError as error:
        raise unwritable("the spec", path, error, "choose another folder with -o") from None
    notes = [*warned, *remarks]
    allowed = [folder.resolve() for folder in (settings.root, *settings.allow_path)]
    for given, what in ((model.path, "model"), (arguments.data, "data")):
        if given is not None and not any(given.resolve().is_relative_to(folder) for folder in allowed):
            folder = given.absolute() if given.is_dir() else given.absolute().parent
            notes.append(f"the {what} is outside {settings.root}: run with --qdq-allow-path={folder}")
    shapes = {one.name: one.shape for one in proposed}
    sources = {"calibration": data.calibration, "evaluation": data.evaluation, "labels": data.labelled}
    command = f"pytest {shlex.quote(str(path))}"
    found = {"inputs": shapes, "data": sources, "command": command}
    return conclude(arguments, f"run it with: {command}", notes, found, path)


# ---- the text of the spec ------------------------------------------------------------------------


def _spec_text(
    model: Model,
    output: Path,
    settings: Settings,
    data: DataDraft,
    proposed: Sequence[InputDraft],
    warned: Sequence[str],
    *,
    is_chosen: bool,
) -> str:
    """The text of the spec: facts of the model as comments, its inputs, and all other keys as comments.

    The spec names the backend if the command line does.
    """
    from qdqspec.backends.base import BuildOptions, backend_named
    from qdqspec.graph.model import require_path

    backend, options = backend_named(settings.backend), BuildOptions.of(settings)
    capabilities = backend.capabilities(options)
    found, formats = judged(model, settings), _possible_formats(model, capabilities)
    shapes = {one.name: one.shape for one in proposed if one.shape is not None}
    head = [f"# Written by qdqspec init {__version__}. Editors complete it from: qdqspec schema", "#"]
    for sentence in (
        *_state_facts(model, found, backend.target, shapes),
        *(f"Note: {one}" for one in warned),
    ):
        head += textwrap.wrap(plain(sentence), 110, initial_indent="# ", subsequent_indent="#   ")
    head.append("# Each line below that is a comment can be used alone: remove its '# '.")
    path = relative_text(require_path(model), output.absolute().parent)
    lines = [*head, "qdqspec: 1", f"model: {quoted(path)}"]
    lines += [f"backend: {settings.backend}"] if is_chosen else []
    lines += ["", *_input_lines(proposed, data), "", *_quantize_lines(model, found, formats)]
    objective = "preset: default" if capabilities.has_clock else "objective: coverage"
    lines += [f"tune: {{{objective}, minutes: 5, min_sqnr_db: 20}}   # no placement below 20 dB wins", ""]
    checks = _check_lines(backend, data, is_timed=capabilities.has_clock, can_gain=bool(formats))
    return "\n".join([*lines, "checks:", *checks]) + "\n"


def _quantize_lines(model: Model, found: Judged, formats: Sequence[str]) -> Iterator[str]:
    """Formats, and the operators that stay float; nothing if no operator can be quantized."""
    usual = QuantizeRules().format
    others = [name for name in formats if name != usual]
    if not formats:
        return
    if usual in formats:
        more = f"; also possible here: {', '.join(others[:_FORMATS])}" if others else ""
        more += f" and {len(others) - _FORMATS} more" if len(others) > _FORMATS else ""
        yield f"# matrix: {{quant: [{usual}]}}   # a case for each format{more}"
    else:
        yield f"quantize: {{format: {formats[0]}}}   # no operator of this model can have {usual} here"
    quantizable = (model.by_name[name] for name, reason in found.reasons.items() if not reason)
    ops = Counter(node.op_type for node in quantizable if re.fullmatch(r"[A-Z]\w+", node.op_type))
    denied = "Softmax" if "Softmax" in ops else min(ops, key=lambda op: (ops[op], op), default="")
    excluded = next(node.name for node in reversed(model.nodes) if not node.is_marker)
    nodes = f"nodes: {{exclude: [{json.dumps(excluded, ensure_ascii=False)}]}}"
    patterns = f"deny: [{denied}], {nodes}" if denied else nodes
    yield f"# patterns: {{{patterns}}}   # operators and nodes that stay float"
    if usual in formats:
        yield "# quantize: {calibration: entropy, weights: per-channel}"
    yield ""


def _check_lines(backend: Backend, data: DataDraft, *, is_timed: bool, can_gain: bool) -> Iterator[str]:
    if not is_timed:
        yield f"  - {{kind: builds, backend: {backend.name}}}   # the tuned model; nothing is timed here"
    elif can_gain:
        yield "  - {kind: speedup, min: 1.1}             # reference time over tuned time; fails if it gains less"
    yield "  - {kind: parity, min_sqnr_db: 20}       # of its outputs on all data against the float model's"
    if data.metric:
        yield f"  # - {{kind: accuracy, metric: {data.metric}, max_drop: 1%}}"
    if is_timed:
        yield f"  # - {{kind: latency, max_ms: {{{backend.target}: 10}}}}"
        yield "  # - {kind: regression, max: 5%}         # against a committed baseline: pytest --qdq-update=new"
    own = declaration_of(backend.name).lint_targets
    if target := backend.target if backend.target in own else next(iter(own), ""):
        yield f"  # - {{kind: lint, target: [{target}]}}"


def _input_lines(inputs: Sequence[InputDraft], data: DataDraft) -> Iterator[str]:
    shaped = [one for one in inputs if one.shape and all(one.shape)]
    scalars = [one for one in inputs if one.shape == () and one.kind not in _FLOATS]
    yield "inputs:"
    if shaped:
        yield "  shapes:                                 # at which the model is timed"
        yield from (f"    {_shape_text(one)}" for one in shaped)
        unranked = (one for one in inputs if one.shape is None and one.kind != "no tensor")
        yield from (f"    # {quoted(one.name)}: [1]  # {one.kind}, of unknown rank" for one in unranked)
    else:
        yield "  values: {}                              # inputs fixed to a value, by name"
    if scalars and shaped:
        fixed = ", ".join(f"{quoted(one.name)}: {'true' if one.kind == 'bool' else 1}" for one in scalars)
        yield f"  # values: {{{fixed}}}   # fixed in the tuned model; write the value that is used"
    about = "one array per input, first axis = samples" + (
        "" if data.calibration else "; without it inputs are random"
    )
    yield f"  {_data_line('calibration', data.calibration)}  # {about}"
    more = "" if data.labelled else "; with `labels` also for {kind: accuracy, max_drop: 1%}"
    judged = "the same data as calibration: name other samples" if data.is_shared else "the same to judge by"
    yield f"  {_data_line('evaluation', data.evaluation)}  # {judged}{more}"


def _data_line(key: str, found: str) -> str:
    """A line for data that was found, else a comment with an example."""
    return f"{key}: {found}" if found else f"# {key}: data.npz".ljust(34)


def _shape_text(one: InputDraft) -> str:
    assert one.shape is not None
    shape = str(list(one.shape))
    if one.span is not None and one.span.min != one.span.max:
        shape = f"{{min: {list(one.span.min)}, opt: {shape}, max: {list(one.span.max)}}}"
    origin = "fixed"
    if one.open_dims:
        which = ", ".join(map(str, one.open_dims))
        single = len(one.open_dims) == 1
        source = "taken from the data" if one.from_data else "a guess" if single else "guesses"
        origin = f"dimension {which} is dynamic, and this is {source}"
        if not single:
            origin = f"dimensions {which} are dynamic, and these are {source}"
    return f"{quoted(one.name)}: {shape}  # {one.kind}, {origin}"


def _possible_formats(model: Model, capabilities: Capabilities) -> list[str]:
    """The backend's formats that some operator of the model can have."""
    from qdqspec.graph.conversion import with_integer_kernels
    from qdqspec.graph.fold import fold_weights
    from qdqspec.qdq.search_space import SchemeSpace

    base, _ = with_integer_kernels(model, quantizes_half=capabilities.quantizes_half)
    folded = fold_weights(base).model
    spaces = {
        name: SchemeSpace(folded, capabilities, rules=QuantizeRules(format=name))
        for name in capabilities.formats
    }
    return [name for name, space in spaces.items() if space.units]


def _state_facts(
    model: Model, found: Judged, target: str, shapes: Mapping[str, Sequence[int]]
) -> Iterator[str]:
    from qdqspec.graph.regions.forecast import forecast_line, forecast_tuning

    ops = Counter(node.op_type for node in model.nodes if not node.is_marker)
    yield f"opset {model.opset}, {ops.total()} nodes: {_counts_text(ops)}"
    integer = Counter(model.by_name[name].op_type for name, reason in found.reasons.items() if not reason)
    yield f"{target} can run in integers: {_counts_text(integer) or 'nothing'}"
    refused = Counter(reason for reason in found.reasons.values() if reason and not _OF_COURSE.search(reason))
    yield from (f"not quantized, {count}: {reason}" for reason, count in refused.most_common(_REASONS))
    if found.note:
        yield f"{found.backend}: {found.note}"
    yield forecast_line(forecast_tuning(model, TIMED_TRIALS["default"], shapes))


def _counts_text(counts: Mapping[str, int]) -> str:
    """Counts of operators, the most frequent first: ``Conv 26, MaxPool 3``."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(ranked) - _OPS} more" if len(ranked) > _OPS else ""
    return ", ".join(f"{name} {count}" for name, count in ranked[:_OPS]) + more


# ---- inputs and data -----------------------------------------------------------------------------


def _propose_input(model: Model, name: str, known: InputShape | None) -> InputDraft:
    """An input with a size for each dynamic dimension: from the data, else batch 1 and a usual size of images."""
    import onnx

    from qdqspec.accuracy.shapes import named_dims

    elem_type = model.elem_type(name)
    kind = onnx.TensorProto.DataType.Name(elem_type).lower() if elem_type else "no tensor"
    own = model.shape(name)
    if own is None:
        return InputDraft(name=name, kind=kind, shape=None)
    is_sound = any(isinstance(dim, str) and _OF_SOUND.search(dim.lower()) for dim in named_dims(model, name))
    usual = _IMAGE if len(own) == 4 else _SEQUENCE if "int" in kind else _SOUND if is_sound else _OTHER
    filled = tuple(size if size is not None and size >= 0 else usual for size in own)
    open_dims = tuple(index for index, size in enumerate(own) if size is None or size < 0)
    if 0 in open_dims and len(own) > 1:
        filled = (1, *filled[1:])
    if known is not None:
        return InputDraft(
            name=name, kind=kind, shape=known.opt, open_dims=open_dims, from_data=True, span=known
        )
    return InputDraft(name=name, kind=kind, shape=filled, open_dims=open_dims)


def _unify_named_dims(model: Model, proposed: list[InputDraft]) -> list[InputDraft]:
    """The inputs with one size for each named dimension: from the data, else from the input of the highest rank."""
    from qdqspec.accuracy.shapes import named_dims

    names = {one.name: named_dims(model, one.name) for one in proposed if one.shape is not None}
    sizes: dict[int | str | None, int] = {}
    for one in sorted(proposed, key=lambda one: (not one.from_data, -len(one.shape or ()))):
        for dim, size in zip(names.get(one.name, ()), one.shape or (), strict=False):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    unified = []
    for one in proposed:
        if one.shape is not None and not one.from_data:
            dims = zip(names[one.name], one.shape, strict=True)
            one = replace(one, shape=tuple(sizes.get(dim, size) for dim, size in dims))
        unified.append(one)
    return unified


def find_data(path: Path, model: Model, base: Path) -> tuple[DataDraft, Inputs, list[str]]:
    """The data entries of a spec in folder ``base``, the inputs with that data, and notes.

    ``path`` is a file or a folder. Raises `ConfigError` if nothing there fits the model.
    """
    from qdqspec.accuracy.metrics import fitting_metric
    from qdqspec.graph.model import shape_text

    if not path.exists():
        cure = "--data takes one file or folder"
        raise ConfigError("there is no such file or folder", where=path, cure=cure)
    files = [path]
    if path.is_dir():
        files = sorted(one for one in path.rglob("*") if one.is_file() and not one.name.startswith("."))
    arrays = [file for file in files if file.suffix in (".npz", ".npy")]
    if path.is_file() and arrays:
        fits = {path: _open_dataset(model, path)}
    else:
        # The labels of the samples of .npy files are beside them.
        has_labels = {file.parent for file in arrays if file.name == "labels.npy"}
        sets = dict.fromkeys(
            file.parent if file.suffix == ".npy" and file.parent in has_labels else file for file in arrays
        )
        fits = {found: data for found in sets if (data := _fitting_dataset(model, found))}
    if not fits and path.is_dir() and (data := _fitting_dataset(model, path)):
        fits = {path: data}
    shapes = {name: model.shape(name) for name in model.inputs}
    needed = ", ".join(
        name if shape is None else f"{name} {shape_text(shape)}" for name, shape in shapes.items()
    )
    if not fits:
        raise ConfigError(
            f"no data there fits the model's inputs: {needed}",
            where=path,
            cure="save .npz files with one array per input, first axis samples; arrays of other names are mapped in "
            "the spec: {arrays: FILE, names: {INPUT: ARRAY}}, and images too: {images: FOLDER, size: SIDE}",
        )
    calibration, evaluation = _choose_data(path, fits)
    data = fits.get(evaluation) or _fitting_dataset(model, evaluation)
    labels = None if data is None else data.labels
    scored = next((model.shape(name) for name in model.outputs), None)
    draft = DataDraft(
        calibration=quoted(relative_text(calibration, base)),
        evaluation=quoted(relative_text(evaluation, base)),
        labelled=labels is not None,
        metric="" if labels is None else fitting_metric(labels, scored),
    )
    notes = []
    unfitting = [  # of the files that are named after their use
        file
        for file in arrays
        if not any(file == fit or file.is_relative_to(fit) for fit in fits)
        and any(use.search(f"{file.parent.name} {file.stem}".lower()) for use in (_CALIBRATION, _EVALUATION))
    ]
    if unfitting:
        left = f"{count_text(len(unfitting), 'file')} left out, as {unfitting[0]}"
        notes.append(f"{left}: the arrays do not fit {needed} (first axis samples)")
    if draft.is_shared:
        folder = path if path.is_dir() else path.parent
        notes.append(
            "calibration and evaluation are the same data: accuracy looks better on it than on other data; name other "
            f"samples at `evaluation` in the spec (init finds {folder / 'calibration'} and {folder / 'evaluation'})"
        )
    if labels is not None and not draft.metric:
        notes.append(
            f"labels of {labels.dtype} {list(labels.shape)} fit no built-in metric of the first output: an "
            "accuracy check needs `output`, or a metric of your own (fixture qdq_metrics)"
        )
    return draft, Inputs(calibration=calibration, evaluation=evaluation), notes


def _fitting_dataset(model: Model, path: Path) -> Dataset | None:
    """The data of a path; ``None`` if it does not fit the model."""
    try:
        return _open_dataset(model, path)
    except QdqspecError:
        return None


def _open_dataset(model: Model, path: Path) -> Dataset:
    from qdqspec.accuracy.data import open_data, shaped_by_data
    from qdqspec.accuracy.shapes import input_specs

    shaped = shaped_by_data(model, Inputs(calibration=path))
    return open_data(path, input_specs(model, shaped))


def _choose_data(path: Path, fits: Mapping[Path, Dataset]) -> tuple[Path, Path]:
    """Calibration and evaluation data: by the names of folders, then of files, and by whether data has labels."""

    def named(files: Sequence[Path], pattern: re.Pattern[str]) -> Path | None:
        return next((file for file in files if pattern.search(file.stem.lower())), None)

    def folder_or_glob(folder: Path) -> Path:
        """The folder, or a glob if its files are in folders of it."""
        own = [file for file in found if file.is_relative_to(folder)]
        return folder if any(file.parent == folder for file in own) else folder / "**" / f"*{own[0].suffix}"

    found = list(fits)
    inside = (file.relative_to(path).parts for file in found if file.is_relative_to(path))
    folders = sorted({path / parts[0] for parts in inside if len(parts) > 1})
    calibration, evaluation = named(folders, _CALIBRATION), named(folders, _EVALUATION)
    if calibration is not None and evaluation is not None and evaluation != calibration:
        return folder_or_glob(calibration), folder_or_glob(evaluation)
    calibration, evaluation = named(found, _CALIBRATION), named(found, _EVALUATION)
    if calibration is None and evaluation is None and len(found) > _MANY and path.is_dir():
        return folder_or_glob(path), folder_or_glob(path)
    labelled = next((file for file in found if fits[file].labels is not None), None)
    evaluation = evaluation or labelled or next((file for file in found if file != calibration), found[0])
    return calibration or next((file for file in found if file != evaluation), evaluation), evaluation


def quoted(text: str) -> str:
    """A text as YAML reads it back: unquoted if that is safe, else in double quotes."""
    if _SAFE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    written = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in written)


def relative_text(path: Path, base: Path) -> str:
    """A path relative to a folder, with slashes, as a spec there names it."""
    return Path(os.path.relpath(path.absolute(), base)).as_posix()
