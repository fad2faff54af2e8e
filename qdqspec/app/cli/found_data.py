"""Finds data that fits a model among the files of a folder, for ``init --data``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec._core.units import count_text
from qdqspec.errors import ConfigError, QdqspecError
from qdqspec.types import Inputs

if TYPE_CHECKING:
    from qdqspec.accuracy.data import Dataset
    from qdqspec.graph.model import Model

_CALIBRATION, _EVALUATION = re.compile("calib|train"), re.compile("eval|val|test")
_MANY = 4  # more files than this without telling names are one data set


_SAFE = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})  # not text for some YAML


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


def find_data(path: Path, model: Model, base: Path) -> tuple[DataDraft, Inputs, list[str]]:
    """The data entries of a spec in folder ``base``, the inputs with that data, and notes.

    ``path`` is a file or a folder. Raises `ConfigError` if nothing there fits the model.
    """
    from qdqspec.accuracy.metrics import fitting_metric

    if not path.exists():
        raise ConfigError(
            "there is no such file or folder", where=path, cure="--data takes one file or folder"
        )
    files = _files(path)
    if path.suffix in (".npz", ".npy") and path.is_file():
        fits = {path: _open_dataset(model, path)}
    else:
        arrays = dict.fromkeys(_folder_with_labels(file) for file in files if file.suffix in (".npz", ".npy"))
        fits = {found: data for found in arrays if (data := opened(model, found))}
    if not fits and path.is_dir() and (data := opened(model, path)):
        fits = {path: data}
    if not fits:
        raise ConfigError(
            f"no data there fits the model's inputs: {', '.join(_input_text(model, name) for name in model.inputs)}",
            where=path,
            cure="save .npz files with one array per input, first axis samples; arrays of other names are mapped in "
            "the spec: {arrays: FILE, names: {INPUT: ARRAY}}, and images too: {images: FOLDER, size: SIDE}",
        )
    calibration, evaluation = _choose_data(path, fits)
    data = fits.get(evaluation) or opened(model, evaluation)
    labels = None if data is None else data.labels
    scored = next((model.shape(name) for name in model.outputs), None)
    draft = DataDraft(
        calibration=quoted(relative_text(calibration, base)),
        evaluation=quoted(relative_text(evaluation, base)),
        labelled=labels is not None,
        metric="" if labels is None else fitting_metric(labels, scored),
    )
    notes = [*_note_unfitting_files(model, files, fits), *_note_shared_data(draft, path)]
    if labels is not None and not draft.metric:
        notes.append(
            f"labels of {labels.dtype} {list(labels.shape)} fit no built-in metric of the first output: an "
            "accuracy check needs `output`, or a metric of your own (fixture qdq_metrics)"
        )
    return draft, Inputs(calibration=calibration, evaluation=evaluation), notes


def _note_unfitting_files(model: Model, files: Sequence[Path], fits: Mapping[Path, Dataset]) -> list[str]:
    """A note if arrays in files named after their use do not fit the model."""
    named = [
        file
        for file in files
        if file.suffix in (".npz", ".npy")
        and not any(file == fit or file.is_relative_to(fit) for fit in fits)
        and any(
            kind.search(f"{file.parent.name} {file.stem}".lower()) for kind in (_CALIBRATION, _EVALUATION)
        )
    ]
    if not named:
        return []
    needed = ", ".join(_input_text(model, name) for name in model.inputs)
    return [
        f"{count_text(len(named), 'file')} left out, as {named[0]}: the arrays do not fit {needed} (first axis samples)"
    ]


def _note_shared_data(draft: DataDraft, path: Path) -> list[str]:
    """A note if evaluation uses the data that calibrates the ranges."""
    if not draft.is_shared:
        return []
    folder = path if path.is_dir() else path.parent
    problem = "calibration and evaluation are the same data: accuracy looks better on it than on other data"
    found = f"init finds {folder / 'calibration'} and {folder / 'evaluation'}"
    return [f"{problem}; name other samples at `evaluation` in the spec ({found})"]


def opened(model: Model, path: Path) -> Dataset | None:
    """The data of a path; ``None`` if it does not fit the model."""
    try:
        return _open_dataset(model, path)
    except QdqspecError:
        return None


def _open_dataset(model: Model, path: Path) -> Dataset:
    from qdqspec.accuracy.data import open_data, shaped_by_data
    from qdqspec.accuracy.shapes import input_specs, resolve_shapes

    shaped = shaped_by_data(model, Inputs(calibration=path))
    return open_data(path, input_specs(model, resolve_shapes(model, shaped), shaped.profiles))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))


def _folder_with_labels(file: Path) -> Path:
    """The folder of an .npy file if the labels of its samples are there, else the file."""
    return file.parent if file.suffix == ".npy" and (file.parent / "labels.npy").is_file() else file


def _choose_data(path: Path, fits: dict[Path, Dataset]) -> tuple[Path, Path]:
    """Calibration and evaluation data, by name and by whether it has labels."""
    found = list(fits)
    calibration = _find_named(found, _CALIBRATION)
    evaluation = _find_named(found, _EVALUATION)
    if (folders := _find_folders(path, found)) is not None:
        return _folder_or_glob(folders[0], found), _folder_or_glob(folders[1], found)
    if calibration is None and evaluation is None and len(found) > _MANY and path.is_dir():
        return _folder_or_glob(path, found), _folder_or_glob(path, found)
    labelled = next((file for file in found if fits[file].labels is not None), None)
    evaluation = evaluation or labelled or next((file for file in found if file != calibration), found[0])
    return calibration or next((file for file in found if file != evaluation), evaluation), evaluation


def _find_folders(path: Path, files: Sequence[Path]) -> tuple[Path, Path] | None:
    """The folders of calibration and evaluation data inside ``path``, if there is one of each by name."""
    inside = (file.relative_to(path).parts for file in files if file.is_relative_to(path))
    found = sorted({path / parts[0] for parts in inside if len(parts) > 1})
    calibration, evaluation = _find_named(found, _CALIBRATION), _find_named(found, _EVALUATION)
    return None if calibration is None or evaluation in (None, calibration) else (calibration, evaluation)


def _folder_or_glob(folder: Path, files: Sequence[Path]) -> Path:
    """The folder, or a glob if its files are in folders of it."""
    own = [file for file in files if file.is_relative_to(folder)]
    return folder if any(file.parent == folder for file in own) else folder / "**" / f"*{own[0].suffix}"


def _find_named(files: Sequence[Path], pattern: re.Pattern[str]) -> Path | None:
    return next((file for file in files if pattern.search(file.stem.lower())), None)


def _input_text(model: Model, name: str) -> str:
    from qdqspec.graph.model import shape_text

    shape = model.shape(name)
    return name if shape is None else f"{name} {shape_text(shape)}"


def quoted(text: str) -> str:
    """A text as YAML reads it back: unquoted if that is safe, else in double quotes."""
    if _SAFE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    written = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in written)


def relative_text(path: Path, base: Path) -> str:
    """A path relative to a folder, with slashes, as a spec there names it."""
    return Path(os.path.relpath(path.absolute(), base)).as_posix()
