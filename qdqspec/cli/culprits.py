"""``explain --culprits``: rank the Q/DQ pairs of a case, its folder, or any quantized model by their error."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from qdqspec.cases import find_case, is_spec
from qdqspec.cli.words import (
    FINE,
    answer,
    inputs_given,
    model_given,
    settings_from,
    values_left,
)
from qdqspec.config import find_folder
from qdqspec.errors import ConfigError, StateError
from qdqspec.types import Case

if TYPE_CHECKING:
    from qdqspec.config import Settings
    from qdqspec.graph.model import Model
    from qdqspec.placement.import_qdq import Imported
    from qdqspec.placement.scheme import SchemeFile
    from qdqspec.types import FixedValue

    _Placed: TypeAlias = SchemeFile | Imported

_SCHEME, _REFERENCE = "scheme.json", "reference.onnx"


def explain_culprits(arguments: argparse.Namespace) -> int:
    """Rank the pairs and print them."""
    from qdqspec.accuracy.culprits import culprits_of
    from qdqspec.report.culprits import culprits_json, culprits_text
    from qdqspec.session import Session

    if len(arguments.what) > 1:
        raise ConfigError("the pairs of one model are ranked at a time", cure="name one case or model")
    settings = settings_from(arguments)
    with _meant(arguments, settings) as (case, placed, notes), Session(settings) as session:
        most = None if arguments.json else max(arguments.layers, 1)
        setup = session.work(case).setup
        found = culprits_of(setup, placed.pairs, factors=placed.equalized, most=most)
        notes = (*notes, *setup.prepared.warnings)
    text = "\n\n".join((culprits_text(found), *(f"note: {note}" for note in notes)))
    answer(arguments, {**culprits_json(found), "notes": list(notes)}, text)
    return FINE


@contextmanager
def _meant(
    arguments: argparse.Namespace, settings: Settings
) -> Iterator[tuple[Case, _Placed, tuple[str, ...]]]:
    """The float model with its data, as a case, the pairs placed in it, and notes."""
    (what,) = arguments.what
    if what.endswith(".onnx"):
        left, notes = values_left(Path(what), arguments.values)
        original = arguments.reference
        with _model(model_given(Path(what), left), original, arguments.values) as (reference, imported):
            values = None if original is None else arguments.values
            case = Case(id="default", model=reference)
            yield _as_given(case, arguments, values), imported, () if values else notes
        return
    if is_spec(Path(what.partition("::")[0])):
        case = find_case(what, settings, Path.cwd())
        placed = _placed(find_folder(settings, case), f"run it once: pytest {what}")
        yield _as_given(case, arguments, arguments.values), placed, ()
        return
    folder = Path(what).absolute()
    placed = _placed(folder, "name a case, the folder that a run left, or a model")
    left, notes = values_left(folder / _REFERENCE, arguments.values)
    yield _as_given(Case(id="default", model=folder / _REFERENCE), arguments, left), placed, notes


def _as_given(case: Case, arguments: argparse.Namespace, values: Mapping[str, FixedValue] | None) -> Case:
    inputs = inputs_given(case.inputs, shapes=arguments.shapes, data=arguments.data, values=values)
    return replace(case, inputs=inputs)


def _placed(folder: Path, cure: str) -> SchemeFile:
    from qdqspec.placement.scheme import read_scheme

    if not (folder / _SCHEME).is_file():
        raise StateError("there are no results of a run here", where=folder, cure=cure)
    return read_scheme(folder / _SCHEME)


@contextmanager
def _model(
    model: Model, original: Path | None, values: Mapping[str, FixedValue] | None
) -> Iterator[tuple[Path, Imported]]:
    """The float model of a quantized one, and the pairs; without the original it is made by removing them."""
    from qdqspec.graph.model import require_path
    from qdqspec.graph.save import save_model
    from qdqspec.placement.import_qdq import import_placement
    from qdqspec.placement.strip import strip_qdq
    from qdqspec.temporary import TemporaryFolder

    reference = None if original is None else model_given(original, values)
    imported = import_placement(model, reference)
    if original is not None:
        yield original.absolute(), imported
        return
    with TemporaryFolder() as folder:
        stripped = folder / _REFERENCE
        save_model(strip_qdq(model).proto, stripped, inputs=model.user_files, base=require_path(model).parent)
        yield stripped, imported
