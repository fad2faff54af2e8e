"""Rejects a spec that needs a task metric but has no evaluation data."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic_core import PydanticCustomError

from qdqspec.spec.inputs import InputsSection
from qdqspec.spec.kinds import CheckEntry, needs_labels, refused
from qdqspec.spec.locate import Loc
from qdqspec.spec.sections import TuneSection

_HINT = "add inputs: {evaluation: data.npz}, with the model's inputs and 'labels'"


def require_evaluation(inputs: InputsSection, tune: TuneSection, checks: Sequence[CheckEntry] = ()) -> None:
    """Raise pydantic's ``ValidationError`` at each place that needs evaluation data, if there is none."""
    if inputs.evaluation is not None:
        return
    asking: dict[Loc, str] = {
        ("checks", n): f"check '{entry.kind}'" for n, entry in enumerate(checks) if needs_labels(entry.kind)
    }
    if tune.accuracy is not None:
        asking["tune", "accuracy"] = "'tune.accuracy'"
    if asking:
        raise refused({loc: _missing(what) for loc, what in asking.items()})


def _missing(what: str) -> PydanticCustomError:
    context = {"what": what, "hint": _HINT}
    return PydanticCustomError("evaluation", "{what} needs inputs.evaluation, which is not given", context)
