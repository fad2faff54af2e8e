"""Command ``init``: write a commented spec for a model, with its inputs, data, and settings that fit this machine."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec import __version__
from qdqspec._core.config import Settings, flags_given
from qdqspec._core.files import create_file, explained
from qdqspec._core.hooks import declaration_of
from qdqspec._core.units import list_text, plain
from qdqspec.app.cases import SPEC_SUFFIXES
from qdqspec.app.cli.command import MODEL, argument, conclude, output, settings_from, verb
from qdqspec.app.cli.models import judged
from qdqspec.errors import ConfigError, OutputError, QdqspecError
from qdqspec.types import TIMED_TRIALS, Inputs, InputShape, QuantizeRules

if TYPE_CHECKING:
    from qdqspec.accuracy import Dataset
    from qdqspec.backends import Capabilities
    from qdqspec.graph import Model
    from qdqspec.graph.regions import Judged

_IMAGE, _SEQUENCE, _SOUND, _OTHER = 224, 128, 16000, 16  # guesses for dimensions that a model leaves open
_FLOATS = frozenset({"float", "double", "float16", "bfloat16"})
_OF_SOUND = re.compile("sample|audio|sound|wav")
_OPS = 12  # whose counts are shown
_REASONS = 3  # shown for operators that stay float
_FORMATS = 3  # beside the usual one, that are named
_CALIBRATION, _EVALUATION = re.compile("calib|train"), re.compile("eval|val|test")
_SAFE = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})  # not text for some YAML
_OF_COURSE = re.compile("^Constant:|quantized together with|folded into|from shapes or constants")


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDraft:
    """An input of a model. ``shape`` is the proposal of the spec, ``open_dims`` the dimensions that are not fixed.

    ``span`` is the range of shapes in the data, which fixed the open dimensions.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    open_dims: tuple[int, ...] = ()
    span: InputShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDraft:
    """Data that fits the model, as written in the spec. ``metric`` is a built-in one that its labels fit."""

    calibration: str = ""
    evaluation: str = ""
    labelled: bool = False
    metric: str = ""


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
    from qdqspec.accuracy import CaseData
    from qdqspec.graph import cautions, load_model

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
    known = CaseData(model, inputs).shaped().inputs.profiles[0].shapes
    proposed = _propose_inputs(model, known)
    warned = list(cautions(model))
    is_chosen = flags_given(vars(arguments)).get("backend") is not None
    text = _spec_text(model, path, settings, data, proposed, warned, is_chosen=is_chosen)
    with explained("the spec", path, "choose another folder with -o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            create_file(path, text)
        except FileExistsError:
            cure = "name another file with -o"
            raise OutputError(
                "this spec exists already, and is not overwritten", where=path, cure=cure
            ) from None
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

    The spec names the backend if the command line does. Operators and a node are named as examples of what may stay
    float. Its layout is in ``spec.yaml.j2``.
    """
    from jinja2 import Environment, FileSystemLoader, select_autoescape

    from qdqspec.backends import BuildOptions, backend_named
    from qdqspec.graph import require_path

    backend, options, usual = (
        backend_named(settings.backend),
        BuildOptions.of(settings),
        QuantizeRules().format,
    )
    capabilities = backend.capabilities(options)
    found, formats = judged(model, settings), _possible_formats(model, capabilities)
    shapes = {one.name: one.shape for one in proposed if one.shape is not None}
    facts = [*_state_facts(model, found, backend.target, shapes), *(f"Note: {one}" for one in warned)]
    others = [name for name in formats if name != usual]
    more_formats = f"; also possible here: {list_text(others, _FORMATS)}" if others else ""
    quantizable = (model.by_name[name] for name, reason in found.reasons.items() if not reason)
    ops = Counter(node.op_type for node in quantizable if re.fullmatch(r"[A-Z]\w+", node.op_type))
    nodes = [node.name for node in model.nodes if not node.is_marker]
    lint_targets = declaration_of(backend.name).lint_targets
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=select_autoescape(),  # of HTML only
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quoted"] = quoted
    return environment.get_template("spec.yaml.j2").render(
        version=__version__,
        facts=map(plain, facts),
        model=quoted(relative_text(require_path(model), output.absolute().parent)),
        chosen=settings.backend if is_chosen else "",
        shaped=[one for one in proposed if one.shape and all(one.shape)],
        unranked=[one for one in proposed if one.shape is None and one.kind != "no tensor"],
        scalars=[one for one in proposed if one.shape == () and one.kind not in _FLOATS],
        data=data,
        usual=usual,
        formats=formats,
        more_formats=more_formats,
        denied="Softmax" if "Softmax" in ops else min(ops, key=lambda op: (ops[op], op), default=""),
        excluded=json.dumps(next(reversed(nodes), ""), ensure_ascii=False),
        is_timed=capabilities.has_clock,
        backend=backend.name,
        target=backend.target,
        lint_target=backend.target if backend.target in lint_targets else next(iter(lint_targets), ""),
    )


def _possible_formats(model: Model, capabilities: Capabilities) -> list[str]:
    """The backend's formats that some operator of the model can have."""
    from qdqspec.graph import fold_weights, with_integer_kernels
    from qdqspec.qdq import SchemeSpace

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
    from qdqspec.graph.regions import forecast_line, forecast_tuning

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
    return list_text([f"{name} {count}" for name, count in ranked], _OPS)


# ---- inputs and data -----------------------------------------------------------------------------


def _propose_inputs(model: Model, known: Mapping[str, InputShape]) -> list[InputDraft]:
    """The inputs with a size for each dynamic dimension: ``known`` from the data, else batch 1 and a usual size.

    A named dimension has one size in all inputs: from the data, else from the input of the highest rank.
    """
    import onnx

    proposed = dict[str, InputDraft]()
    sizes = dict[str, int]()  # of named dimensions
    ranks = {name: len(model.shape(name) or ()) for name in model.inputs}
    for name in sorted(model.inputs, key=lambda name: (name not in known, -ranks[name])):
        elem_type, own, span = model.elem_type(name), model.shape(name), known.get(name)
        kind = onnx.TensorProto.DataType.Name(elem_type).lower() if elem_type else "no tensor"
        if own is None:
            proposed[name] = InputDraft(name=name, kind=kind, shape=None)
            continue
        dims = model.named_dims(name)
        is_sound = any(isinstance(dim, str) and _OF_SOUND.search(dim.lower()) for dim in dims)
        usual = _IMAGE if len(own) == 4 else _SEQUENCE if "int" in kind else _SOUND if is_sound else _OTHER
        open_dims = tuple(index for index, size in enumerate(own) if size is None or size < 0)
        shape = [usual if size is None or size < 0 else size for size in own]
        if 0 in open_dims and len(own) > 1:
            shape[0] = 1
        if span is not None:
            shape = [*span.opt]
        for index, dim in enumerate(dims):
            if isinstance(dim, str):
                size = sizes.setdefault(dim, shape[index])
                shape[index] = shape[index] if span is not None else size
        proposed[name] = InputDraft(name=name, kind=kind, shape=(*shape,), open_dims=open_dims, span=span)
    return [proposed[name] for name in model.inputs]


def find_data(path: Path, model: Model, base: Path) -> tuple[DataDraft, Inputs, list[str]]:
    """The data entries of a spec in folder ``base``, the inputs with that data, and notes.

    ``path`` is a file, or a folder in which files and folders are looked for by their names; without such names all of
    it is one data set, or else the first file that fits. Raises `QdqspecError` if nothing there fits the model.
    """
    from qdqspec._core.arrays import shape_text
    from qdqspec.accuracy import fitting_metric

    if not path.exists():
        cure = "--data takes one file or folder"
        raise ConfigError("there is no such file or folder", where=path, cure=cure)
    if path.is_file():
        calibration = evaluation = path
    else:
        below = sorted(path.rglob("*"), key=lambda one: (len(one.parts), one))
        sets = [
            one
            for one in below
            if (one.is_dir() or one.suffix in (".npz", ".npy")) and not one.name.startswith(".")
        ]
        named = [
            next((one for one in sets if use.search(one.stem.lower()) and _fits(one, model)), None)
            for use in (_CALIBRATION, _EVALUATION)
        ]
        one_set = next(filter(None, named), None)
        one_set = one_set or next((one for one in (path, *sets) if _fits(one, model)), None)
        if one_set is None:
            shapes = {name: model.shape(name) for name in model.inputs}
            needed = ", ".join(
                name if shape is None else f"{name} {shape_text(shape)}" for name, shape in shapes.items()
            )
            raise ConfigError(
                f"no data there fits the model's inputs: {needed}",
                where=path,
                cure="save .npz files with one array per input, first axis samples; arrays of other names are mapped "
                "in the spec: {arrays: FILE, names: {INPUT: ARRAY}}, and images too: {images: FOLDER, size: SIDE}",
            )
        calibration, evaluation = (one or one_set for one in named)
    labels = _open_dataset(evaluation, model).labels
    scored = next((model.shape(name) for name in model.outputs), None)
    draft = DataDraft(
        calibration=quoted(relative_text(calibration, base)),
        evaluation=quoted(relative_text(evaluation, base)),
        labelled=labels is not None,
        metric="" if labels is None else fitting_metric(labels, scored),
    )
    notes = []
    if calibration == evaluation:
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


def _open_dataset(path: Path, model: Model) -> Dataset:
    from qdqspec.accuracy import CaseData

    return CaseData(model, Inputs(calibration=path)).shaped().open(path)


def _fits(path: Path, model: Model) -> bool:
    """Whether the data of a path fits the model."""
    try:
        _open_dataset(path, model)
    except QdqspecError:
        return False
    return True


def quoted(text: str) -> str:
    """A text as YAML reads it back: unquoted if that is safe, else in double quotes."""
    if _SAFE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    written = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in written)


def relative_text(path: Path, base: Path) -> str:
    """A path relative to a folder, with slashes, as a spec there names it."""
    return Path(os.path.relpath(path.absolute(), base)).as_posix()
