"""Folders of results that ``tune -o`` wrote: the case, its tuned model and its figures."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

from qdqspec.cli.words import add_inputs, complain, inputs_given
from qdqspec.codec import from_data
from qdqspec.errors import StateError
from qdqspec.files import RESULT
from qdqspec.types import Case, Inputs, TuneRules


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownResult:
    """The case of a folder: its reference, on the backend that it was tuned on. ``model`` is the digest of that.

    ``changed`` is false if the float model was selected.
    """

    case: Case
    name: str
    tuned: Path
    backend: str
    model: str
    changed: bool
    scheme: str = ""
    pairs: int = 0
    sqnr_db: float | None = None


def add_folder_words(parser: argparse.ArgumentParser) -> None:
    """Declare the inputs of the models in folders."""
    add_inputs(
        parser,
        "the model in a DIR",
        shapes_of="dynamic inputs of a DIR (default: those it was tuned with)",
        data="Inputs of a DIR (default: random ones).",
    )


def known_of_folder(folder: Path, arguments: argparse.Namespace) -> KnownResult:
    """The result in a folder. Raises `StateError` if it cannot be read."""
    try:
        result = json.loads((folder / RESULT).read_bytes())
        backend, name = str(result["backend"]), str(result["case"])
        limits = (result["search"] or {}).get("limits") or {}
        case = Case(
            id="default",
            model=folder / "reference.onnx",
            backend=backend,
            inputs=Inputs(profiles=from_data(Inputs, {"profiles": result.get("profiles") or [{}]}).profiles),
            tune=TuneRules(min_sqnr_db=limits.get("min_sqnr_db") or "none"),
        )
        used = (result["parity"] or {}).get("data")
        if arguments.data is None and used in ("calibration", "evaluation"):
            given = os.path.relpath(folder)
            complain(
                f"note: {name}: inputs are random here; {given} was tuned with {used} data: give it with --data"
            )
        inputs = inputs_given(
            case.inputs, shapes=arguments.shapes, data=arguments.data, values=arguments.values
        )
        return KnownResult(
            case=replace(case, inputs=inputs),
            name=name,
            tuned=folder / "tuned.onnx",
            backend=backend,
            model=str(result["model"]["sha256"]),
            changed=result["status"] != "unchanged",
            scheme=str((result["scheme"] or {}).get("digest", "")),
            pairs=sum(not pair["weight"] for pair in result["placement"]),
            sqnr_db=(result["parity"] or {}).get("sqnr_db"),
        )
    except OSError as error:
        raise StateError(
            f"there is no {RESULT} that can be read: {error.strerror}",
            where=folder,
            cure="name the folder of a case, which has its tuned.onnx",
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(
            f"the result cannot be read: {error}", where=folder / RESULT, cure="tune again"
        ) from None
