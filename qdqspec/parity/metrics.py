"""Task metrics on labelled data: built-in ones, and those of the caller. Higher is better."""

from __future__ import annotations

import numbers
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qdqspec.arrays import Array
from qdqspec.errors import ConfigError, DataError
from qdqspec.parity.tallies import BUILT_IN, Tally, tally_named
from qdqspec.registry import did_you_mean
from qdqspec.types import Metric

Batches = Iterable[Mapping[str, Array]]

_HOW = (
    "define it in a fixture qdq_metrics of a conftest.py: return {{'{name}': function}}, called as "
    "function(outputs, labels); from Python: Session(metrics={{...}})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A metric's value over ``samples``; ``right`` is its result per sample, if the metric has one."""

    value: float
    samples: int
    right: npt.NDArray[np.bool_] | None = None


def require_metric(name: str, own: Mapping[str, Metric]) -> None:
    """Raise `ConfigError` with the nearest name if a metric is neither the caller's nor built in."""
    if name in own or tally_named(name) is not None:
        return
    known = (*own, *BUILT_IN)
    raise ConfigError(
        f"unknown metric '{name}'{did_you_mean(name, known)}",
        cure=f"known: {', '.join(known)}; {_HOW.format(name=name)}",
    )


def evaluate(
    name: str,
    outputs: Batches,
    labels: Array,
    *,
    output: str | None = None,
    own: Mapping[str, Metric] | None = None,
) -> Score:
    """Score a model's outputs with the caller's metric of that name, else with the built-in one.

    ``outputs`` are those of consecutive feeds, first axis the batch; ``labels`` has one entry per sample.
    ``output`` names the one to score: if it is None a built-in metric uses the first, the caller's gets them
    all. Raises `ConfigError` for an unknown metric, `DataError` for unsuitable outputs, labels or metric
    values.
    """
    require_metric(name, own or {})
    if own and name in own:
        return _of_own(name, own[name], outputs, labels, output)
    begin = tally_named(name)
    assert begin is not None  # require_metric has verified it
    return _counted(begin(), outputs, labels, output)


def _counted(tally: Tally, outputs: Batches, labels: Array, output: str | None) -> Score:
    """Score batch by batch, so that outputs need not be in memory together."""
    tally.require(labels)
    done = 0
    for batch in outputs:
        scores = _scores(batch, output)
        chosen = labels[done : done + len(scores)]
        if len(chosen) < len(scores):
            raise DataError(
                f"the model gave more outputs than the {len(labels)} labels", cure="give every sample one"
            )
        tally.add(scores, chosen)
        done += len(scores)
    if done != len(labels) or done == 0:
        raise DataError(
            f"the model gave {done} outputs for {len(labels)} labels",
            cure="give every sample one label",
        )
    return Score(value=tally.value, samples=done, right=tally.right)


def _scores(batch: Mapping[str, Array], output: str | None) -> Array:
    found = batch[_named(batch, next(iter(batch)) if output is None else output)]
    if found.ndim < 2:
        name = output or next(iter(batch))
        raise DataError(
            f"output '{name}' has shape {list(found.shape)}, which are no class scores a sample",
            cure="name the output with the scores",
        )
    return found


def _named(batch: Mapping[str, Array], name: str) -> str:
    if name not in batch:
        raise DataError(
            f"the model has no output '{name}'{did_you_mean(name, [*batch])}",
            cure=f"its outputs: {', '.join(batch)}",
        )
    return name


# ---- the caller's own ---------------------------------------------------------------------------


def _of_own(name: str, metric: Metric, outputs: Batches, labels: Array, output: str | None) -> Score:
    gathered = _gathered(outputs, len(labels), output)
    given = labels.view()
    given.flags.writeable = False  # the same labels are used again
    try:
        value: object = metric(gathered, given)
    except Exception as error:  # any error of the caller's code is reported by its name and position
        raise DataError(
            f"metric '{name}' raised {type(error).__name__}: {error}",
            where=_place(error, metric),
            cure=_called(gathered, labels),
        ) from error
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    if isinstance(value, numbers.Real):
        return Score(value=float(value), samples=len(labels))
    raise DataError(
        f"metric '{name}' gave {_kind(value)}, and one number is wanted", cure=_called(gathered, labels)
    )


def _gathered(outputs: Batches, samples: int, output: str | None) -> dict[str, Array]:
    """Each output over all samples, or the named one."""
    parts: dict[str, list[Array]] = {}
    for batch in outputs:
        for name in batch if output is None else (_named(batch, output),):
            parts.setdefault(name, []).append(batch[name])
    return {name: _joined(values, samples) for name, values in parts.items()}


def _joined(values: list[Array], samples: int) -> Array:
    """Concatenated along the first axis if that counts samples, else an array of arrays, one for each feed."""
    shapes = {(value.shape[1:], value.dtype) for value in values if value.ndim}
    if len(shapes) == 1 and all(v.ndim for v in values) and sum(map(len, values)) == samples:
        return np.concatenate(values)
    apart = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        apart[index] = value
    return apart


def _place(error: Exception, metric: Callable[..., object]) -> str | None:
    """The last executed line in the metric's own file."""
    own = getattr(getattr(metric, "__code__", None), "co_filename", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if own is None or f.filename == own]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if own is not None and frames else None


def _called(outputs: Mapping[str, Array], labels: Array) -> str:
    """The arguments of a metric, for messages to its author."""
    shapes = ", ".join(f"{name} {_shape(values)}" for name, values in outputs.items())
    return f"it is called with outputs by name ({shapes}) and labels {list(labels.shape)}, and must return one number"


def _shape(values: Array) -> str:
    apart = (
        f"{len(values)} arrays, the first {list(values[0].shape)}"
        if values.dtype == object and len(values)
        else ""
    )
    return apart or str(list(values.shape))


def _kind(value: object) -> str:
    return f"an array of shape {list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)[:40]
