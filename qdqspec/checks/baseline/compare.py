"""Decides whether a run is comparable with a baseline, and lists other differences.

The facts that determine a model's speed must be equal: model, quantization rules, shapes, clock. The device
is the file's name. Versions, processor frequencies and the like are reported, but do not prevent a
comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qdqspec._core.node_digests import changes_text
from qdqspec.checks.baseline.store import Entry, Figure, Name, read_baseline
from qdqspec.errors import StateError
from qdqspec.types import BaselineFigure, Case, Clock, Outcome, TimeChange

USUAL_DRIFT = 0.05  # of the reference's time between runs, which leaves ratios alone
CONDITIONS_SHARE = 0.5  # of what is more, by which a ratio may change


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of a run's ratio, measured at an ISO 8601 time; ``nodes`` are those of `_core.node_digests`."""

    clock: Clock
    model_sha256: str
    nodes: str = ""
    rules: Mapping[str, Any]
    scheme: str
    environment: Mapping[str, str]
    recorded: str = ""


def rules_of(case: Case) -> dict[str, Any]:
    """The rules of a case that its ratio depends on, as JSON values by flat names, without the search budget."""
    quantize, patterns, inputs = case.quantize, case.patterns, case.inputs
    shapes = [
        {name: [list(shape.min), list(shape.opt), list(shape.max)] for name, shape in profile.shapes.items()}
        for profile in inputs.profiles
    ]
    return {
        "quantize.format": quantize.format,
        "quantize.calibration": quantize.calibration,
        "quantize.weights": quantize.weights,
        "quantize.activations": quantize.activations,
        "quantize.outputs": quantize.outputs,
        "patterns.allow": sorted(patterns.allow),
        "patterns.deny": sorted(patterns.deny),
        "patterns.include": sorted(patterns.include),
        "patterns.exclude": sorted(patterns.exclude),
        "inputs.shapes": shapes,
        "inputs.weights": [profile.weight for profile in inputs.profiles],
        "inputs.batch": inputs.batch,
        "tune.min_sqnr_db": case.tune.limits.min_sqnr_db,
        "tune.accuracy": None if (rules := case.tune.accuracy) is None else asdict(rules),
    }


def why_incomparable(entry: Entry, now: Conditions, nodes: str = "") -> str:
    """The reason why entry and run are not comparable, or nothing; ``nodes`` are the digests of the entry's model."""
    return next(_unlike(entry, now, nodes), "")


def _unlike(entry: Entry, now: Conditions, nodes: str) -> Iterator[str]:
    known = {"model": entry.model_sha256[:12], "clock": entry.clock, **entry.rules}
    found = {"model": now.model_sha256[:12], "clock": now.clock, **now.rules}
    for name in ("model", "clock", *sorted(entry.rules.keys() & now.rules.keys())):
        if known[name] != found[name]:
            what = changes_text(nodes, now.nodes) if name == "model" else ""
            values = f"{name} was {_value_text(known[name])}, is {_value_text(found[name])}"
            yield f"{values}: {what}" if what else values


def differences(entry: Entry, now: Conditions) -> tuple[str, ...]:
    """Other differences, which may explain a change but do not prevent a comparison."""
    notes = [] if entry.scheme == now.scheme else [f"placement: was {entry.scheme}, is {now.scheme}"]
    for name in sorted(entry.environment.keys() | now.environment.keys()):
        old, new = entry.environment.get(name, "unknown"), now.environment.get(name, "unknown")
        if old != new:
            notes.append(f"{name}: was {old}, is {new}")
    return tuple(notes)


def changes(entry: Entry, now: Conditions, nodes: str = "") -> tuple[str, ...]:
    """All differences that may explain why an entry was renewed."""
    return (*_unlike(entry, now, nodes), *differences(entry, now))


def _value_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "empty"
    return "unset" if value is None else str(value)


def judge_change(change: TimeChange, allowed: float) -> Outcome:
    """Fail if the intervals over builds and by ranks both exclude the allowance and the effect of other conditions."""
    if change.builds.high <= 1 + allowed:
        return "pass"
    most = (1 + allowed) * conditions_effect(change)
    return "fail" if change.builds.low > most and change.ranks.low > most else "inconclusive"


def conditions_effect(change: TimeChange) -> float:
    """The factor by which a ratio may change since the reference ran in other conditions; 1 if it did not.

    Other work on the machine slows the faster model more: where it made a float network 22 to 50 % slower, the ratio
    of the tuned one grew by up to a third of that (docs/how-to/baselines.md).
    """
    drift = max(change.reference, 1 / change.reference) - 1
    return 1 + CONDITIONS_SHARE * max(0.0, drift - USUAL_DRIFT)


def is_stale(change: TimeChange, allowed: float) -> bool:
    """Whether the model became faster by more than the allowance, so that the baseline would hide a later loss."""
    least = 1 / ((1 + allowed) * conditions_effect(change))
    return change.builds.high < least and change.ranks.high < least


# The present and past figures of the baselines of a spec.


def history_of(entry: Entry, device: str) -> tuple[BaselineFigure, ...]:
    """The past figures of an entry, the oldest first, and its present one."""
    return tuple(_figure(figure, device) for figure in (*entry.history, entry))


def figures_elsewhere(file: Path, name: Name) -> tuple[BaselineFigure, ...]:
    """The figures of the same check on other devices, from the files beside this one, sorted."""
    found = []
    for other in sorted(set(file.parent.glob("*.json")) - {file}):
        with suppress(StateError):  # reported in a run on that device
            known = read_baseline(other)
            if known is not None and (entry := known.entry(name)) is not None:
                found.append(_figure(entry, known.device))
    return tuple(found)


def _figure(figure: Figure, device: str) -> BaselineFigure:
    return BaselineFigure(device=device, ratio=figure.ratio, recorded=figure.recorded, changed=figure.changed)
