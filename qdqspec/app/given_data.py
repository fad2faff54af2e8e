"""Writes objects of a caller in memory to files: arrays and feeds as data, and models.

A search reads its data several times and in several processes, and identifies it by content; files give both.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Iterable, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from qdqspec._core import registry
from qdqspec._core.files import TemporaryFolder, write_whole
from qdqspec.accuracy import LABELS, npz_bytes
from qdqspec.errors import IN_MEMORY, DataError, QdqspecError
from qdqspec.types import Case, Data, Inputs, Loader

if TYPE_CHECKING:
    import onnx

_DATA = ("calibration", "evaluation")  # arguments
_FORMS = (
    "give a path, {input: array} with samples along the first axis, or an iterable of {input: array}, one a sample or "
    "batch"
)
_TUPLES = (
    "name the arrays: ({'INPUT': x, 'labels': y} for x, y in loader), with the names of the model's inputs"
)
InMemory: TypeAlias = "Mapping[str, Any] | Iterable[Mapping[str, Any]]"
T = TypeVar("T")


class GivenFiles:
    """The files of one session, in a temporary folder that exists as long as this object."""

    def __init__(self) -> None:
        self._folder: TemporaryFolder | None = None
        self._models: dict[str, Path] = {}

    def model(self, given: T) -> T | Path:
        """The file of a model in memory, one for equal models; anything else unchanged.

        It is named after its graph and its content, as are folders of results: exporters give all graphs one name.
        """
        if type(given).__name__ != "ModelProto":  # onnx need not be loaded for a path
            return given
        proto = cast("onnx.ModelProto", given)
        content = proto.SerializeToString(deterministic=True)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", proto.graph.name).strip("-.") or "model"
        name = f"{name}-{hashlib.sha256(content).hexdigest()[:8]}"
        if name not in self._models:
            self._models[name] = self._new() / f"{name}.onnx"
            self._models[name].write_bytes(content)
        return self._models[name]

    def data(self, given: InMemory, name: str) -> Path:
        """A folder of .npz files: one for arrays of samples, one a feed for feeds and for samples of several shapes.

        Errors of the data have ``name`` and the number of the feed: see `DataError`.
        """
        folder = self._new() / IN_MEMORY / name
        folder.mkdir(parents=True)
        if isinstance(given, Mapping):
            try:
                write_whole(folder / "samples.npz", npz_bytes(_arrays(given, name)), what="the data")
                return folder
            except DataError:  # lists of samples of several shapes are no arrays
                if not all(isinstance(value, Sized) for value in given.values()):
                    raise
            counts = {key: len(value) for key, value in given.items()}
            if len(set(counts.values())) > 1:
                listed = ", ".join(f"'{key}' {count}" for key, count in counts.items())
                what = f"lists have unequal numbers of samples: {listed}"
                raise DataError(what, where=name, cure=_FORMS)
            lists, count = given, next(iter(counts.values()))
            given = ({key: value[row] for key, value in lists.items()} for row in range(count))
        feeds: object = given
        if not isinstance(feeds, Iterable) or hasattr(feeds, "__array__"):
            raise DataError(f"this is no data but {type(feeds).__name__}", where=name, cure=_FORMS)
        number = -1
        for number, feed in enumerate(feeds):
            if not isinstance(feed, Mapping):
                what = f"feed {number} is no mapping but {type(feed).__name__}"
                raise DataError(what, where=name, cure=_TUPLES if isinstance(feed, list | tuple) else _FORMS)
            arrays = {
                # a label may be an array of one element
                key: value.reshape(1) if key == LABELS and value.size == 1 else value[None]
                for key, value in _arrays(feed, name).items()
            }
            write_whole(folder / f"{number:08d}.npz", npz_bytes(arrays), what="the data")
        if number < 0:
            raise DataError("it yields no feed", where=name, cure=_FORMS)
        return folder

    def loaded(self, case: Case, loaders: Mapping[str, Loader]) -> Case:
        """The case with folders in place of data loaders; those of entry points are used after ``loaders``."""
        return replace(case, inputs=self.loaded_inputs(case.inputs, {**loaders, **case.loaders}))

    def loaded_inputs(self, inputs: Inputs, loaders: Mapping[str, Loader]) -> Inputs:
        """The inputs with folders in place of data loaders; those of entry points are used after ``loaders``."""
        found: dict[str, Any] = {}
        for word in _DATA:
            source = getattr(inputs, word)
            if not isinstance(source, Data) or not source.loader:
                continue
            name = source.loader
            points = importlib.metadata.entry_points(group="qdqspec.data")
            load, point = loaders.get(name), next((point for point in points if point.name == name), None)
            if load is None and point is not None:
                load = cast(
                    "Loader", registry.loaded(point, "data loader")
                )  # its call shows what is no loader
            if load is not None:  # else reported, with the remedy, when the data is opened
                try:
                    found[word] = replace(source, loader="", path=self.data(load(), name))
                except QdqspecError:
                    raise
                except Exception as error:  # of the caller's code, reported by its name and position
                    raise DataError(
                        f"data loader '{name}' raised {type(error).__name__}: {error}",
                        where=registry.raising_line(error, load),
                        cure="it is called without arguments; correct it there",
                    ) from error
        return replace(inputs, **found)

    def asked(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a case with files in place of data in memory; data that is ``None`` is not given."""
        found = {word: value for word, value in asked.items() if word not in _DATA or value is not None}
        for word in [word for word in _DATA if word in found]:
            value = found[word]
            is_table = isinstance(value, Mapping) and bool(set(value) & {"arrays", "images", "loader"})
            if is_table and not any(hasattr(each, "__array__") for each in value.values()):
                continue  # a table of a spec
            if not isinstance(value, str | os.PathLike):
                found[word] = self.data(value, word)
        return found

    def _new(self) -> Path:
        if self._folder is None:
            self._folder = TemporaryFolder()
        path = self._folder.path / str(len(list(self._folder.path.iterdir())))
        path.mkdir()
        return path


def _arrays(given: Mapping[str, Any], name: str) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a mapping. Raises `DataError` for a value that is not an array of numbers."""
    found, why = {}, ""
    for key, value in given.items():
        try:
            array = np.asarray(value)
            is_number = (
                array.dtype.names is None and not array.dtype.hasobject and array.dtype.kind not in "USV"
            )
        except (ValueError, TypeError, RuntimeError) as error:  # lists of unequal lengths; tensors of a GPU
            is_number, why = False, f" ({error})"
        if not is_number:
            raise DataError(f"'{key}' is no array of numbers{why}", where=name, cure=_FORMS)
        found[str(key)] = array
    return found
