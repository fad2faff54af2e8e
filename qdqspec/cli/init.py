"""Command ``init``: write a commented spec for a model, with its inputs and the settings that fit this machine."""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec import __version__
from qdqspec.cases import SPEC_SUFFIXES
from qdqspec.cli.arguments import MODEL, argument, output, settings_from, verb
from qdqspec.cli.draft import DataDraft, Draft, InputDraft, counted, relative_text
from qdqspec.cli.models import judged
from qdqspec.cli.output import conclude
from qdqspec.collector import uncollected
from qdqspec.config import Settings
from qdqspec.errors import ConfigError, OutputError
from qdqspec.files import create_file, unwritable
from qdqspec.types import TRIALS, Inputs, QuantizeRules

if TYPE_CHECKING:
    from qdqspec.backends.base import Capabilities
    from qdqspec.graph.model import Model
    from qdqspec.regions.inspect import Judged

_IMAGE, _SEQUENCE, _SOUND, _OTHER = 224, 128, 16000, 16  # guesses for dimensions that a model leaves open
_OF_SOUND = re.compile("sample|audio|sound|wav")
_REASONS = 3  # shown for operators that stay float
_OF_COURSE = re.compile("^Constant:|quantized together with|folded into|from shapes or constants")


@verb(
    "init",
    "qdqspec init models/net.onnx --data data/ -o specs/net.qdq.yaml",
    MODEL,
    output(
        "SPEC",
        "The spec to write; missing folders are created (default: <model>.qdq.yaml, here).",
        required=False,
    ),
    argument("--data", "PATH", "A data file, or a folder that is searched for data of the model.", type=Path),
    options=("backend", "device", "backend-option", "allow-path"),
)
@uncollected()
def init(arguments: argparse.Namespace) -> int:
    """Write a commented spec for a model and this machine.

    An existing file is never overwritten.
    """
    from qdqspec.cli.found_data import find_data
    from qdqspec.graph.model import load_model

    settings = settings_from(arguments)
    output = _output(arguments.model, arguments.output)
    model = load_model(arguments.model)
    data, inputs, remarks = DataDraft(), Inputs(), list[str]()
    if arguments.data is not None:
        data, inputs, remarks = find_data(arguments.data, model, output.absolute().parent)
    draft = _draft(model, output, settings, data, inputs)
    _write_new(output, draft.text())
    notes = [*draft.cautions, *remarks, *_outside([model.path, arguments.data], settings)]
    shapes = {one.name: one.shape for one in draft.inputs}
    known = {"calibration": data.calibration, "evaluation": data.evaluation, "labels": data.labelled}
    command = f"pytest {shlex.quote(str(output))}"
    found = {"inputs": shapes, "data": known, "command": command}
    return conclude(arguments, f"run it with: {command}", notes, found, output)


def _output(model: Path, asked: Path | None) -> Path:
    if asked is None:
        return Path(model.name.removesuffix(".onnx").removesuffix(".qdq") + SPEC_SUFFIXES[0])
    if not asked.name.endswith(SPEC_SUFFIXES):
        raise ConfigError(
            "pytest collects a spec by its ending",
            where=asked,
            cure=f"call it {asked.stem}{SPEC_SUFFIXES[0]}",
        )
    return asked


def _write_new(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        create_file(path, text)
    except FileExistsError:
        raise OutputError(
            "this spec exists already, and is not overwritten", where=path, cure="name another file with -o"
        ) from None
    except OSError as error:
        raise unwritable("the spec", path, error, "choose another folder with -o") from None


def _draft(model: Model, output: Path, settings: Settings, data: DataDraft, inputs: Inputs) -> Draft:
    from qdqspec.backends.base import BuildOptions, backend_named
    from qdqspec.graph.cautions import cautions
    from qdqspec.graph.model import require_path
    from qdqspec.parity.data import shaped_by_data

    backend, options = backend_named(settings.backend), BuildOptions.of(settings)
    known = shaped_by_data(model, inputs).profiles[0].opt()
    proposed = _named_alike(model, [_input(model, name, known.get(name)) for name in model.inputs])
    shapes = {one.name: one.shape for one in proposed if one.shape is not None}
    found = judged(model, settings)
    return Draft(
        model=relative_text(require_path(model), output.absolute().parent),
        version=__version__,
        facts=list(_facts(model, found, backend.target, shapes)),
        cautions=list(cautions(model)),
        inputs=proposed,
        data=data,
        denied=_denied(model, found),
        excluded=next((node.name for node in reversed(model.nodes) if not node.is_marker), "/head/*"),
        formats=_formats(model, backend.capabilities(options)),
        target=backend.target,
    )


def _formats(model: Model, capabilities: Capabilities) -> Sequence[str]:
    """The backend's formats that some operator of the model can have; all of them if it has no such operator."""
    from qdqspec.graph.fold import fold_weights
    from qdqspec.placement.space.search_space import SchemeSpace

    folded = fold_weights(model).model
    spaces = {
        name: SchemeSpace(folded, capabilities, rules=QuantizeRules(format=name))
        for name in capabilities.formats
    }
    return [name for name, space in spaces.items() if space.units] or capabilities.formats


def _denied(model: Model, found: Judged) -> str:
    """An operator of the model that would be quantized without it, as an example of a pattern."""
    nodes = (model.by_name[name] for name, reason in found.reasons.items() if not reason)
    ops = Counter(node.op_type for node in nodes if re.fullmatch(r"[A-Z]\w+", node.op_type))
    return "Softmax" if "Softmax" in ops or not ops else min(ops, key=lambda op: (ops[op], op))


def _facts(model: Model, found: Judged, target: str, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    from qdqspec.regions.forecast import forecast_tuning
    from qdqspec.regions.inspect import forecast_line

    ops = Counter(node.op_type for node in model.nodes if not node.is_marker)
    yield f"opset {model.opset}, {ops.total()} nodes: {counted(ops)}"
    integer = Counter(model.by_name[name].op_type for name, reason in found.reasons.items() if not reason)
    yield f"{target} can run in integers: {counted(integer) or 'nothing'}"
    refused = Counter(reason for reason in found.reasons.values() if reason and not _OF_COURSE.search(reason))
    yield from (f"stays float, {count}: {reason}" for reason, count in refused.most_common(_REASONS))
    if found.note:
        yield f"{found.backend}: {found.note}"
    yield forecast_line(forecast_tuning(model, TRIALS["default"], shapes))


def _input(model: Model, name: str, known: tuple[int, ...] | None) -> InputDraft:
    """An input with sizes for its dynamic dimensions: those of the data, else batch 1 and images of a common size."""
    import onnx

    from qdqspec.parity.shapes import named_dims

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
        return InputDraft(name=name, kind=kind, shape=known, open_dims=open_dims, from_data=True)
    return InputDraft(name=name, kind=kind, shape=filled, open_dims=open_dims)


def _named_alike(model: Model, proposed: list[InputDraft]) -> list[InputDraft]:
    """The inputs with one size for each named dimension: that of the data, else of the input of highest rank."""
    from qdqspec.parity.shapes import named_dims

    names = {one.name: named_dims(model, one.name) for one in proposed if one.shape is not None}
    sizes: dict[int | str | None, int] = {}
    for one in sorted(proposed, key=lambda one: (not one.from_data, -len(one.shape or ()))):
        for dim, size in zip(names.get(one.name, ()), one.shape or (), strict=False):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    return [
        one
        if one.shape is None or one.from_data
        else replace(
            one,
            shape=tuple(sizes.get(dim, size) for dim, size in zip(names[one.name], one.shape, strict=True)),
        )
        for one in proposed
    ]


def _outside(paths: Sequence[Path | None], settings: Settings) -> Iterator[str]:
    """Cautions for files that a spec may not name without an option."""
    allowed = (settings.root, *settings.allow_path)
    for path, what in zip(paths, ("model", "data"), strict=True):
        if path is None or any(path.resolve().is_relative_to(folder.resolve()) for folder in allowed):
            continue
        folder = path.absolute() if path.is_dir() else path.absolute().parent
        yield f"the {what} is outside {settings.root}: run with --qdq-allow-path={folder}"
