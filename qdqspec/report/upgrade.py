"""An upgrade check as text and JSON."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate

from qdqspec.codec import to_data
from qdqspec.types import LayerChange, Upgrade, UpgradeCheck
from qdqspec.units import count_text, db_text, interval_text, list_text, ms_text, plain, ratio_text

SCHEMA_VERSION = 1
MOST_LAYERS = 12  # of a case in the text
_NAMED = 4  # nodes of a change in the text


def upgrade_to_json(check: UpgradeCheck) -> dict[str, Any]:
    """The check as data; times are in milliseconds, ratios have their 95 % interval."""
    return {"schema_version": SCHEMA_VERSION, "passed": check.passed, **to_data(check)}


def upgrade_text(check: UpgradeCheck) -> str:
    """Versions, a row for each case, the layers that changed, and a summary."""
    lines = [line for backend in check.here for line in _versions(check, backend)]
    heads = (
        "case",
        "here ms",
        "there ms",
        "change",
        "95 % interval",
        "of float here",
        "there",
        "SQNR dB",
        "",
    )
    rows = [_row(case) for case in check.cases]
    lines.append(tabulate(rows, headers=heads, disable_numparse=True))
    for case in check.cases:
        lines += _layer_lines(case)
    lines += [f"{plain(c.case)}: {c.state}: {plain(c.reason, 400)}" for c in check.cases if c.state != "ok"]
    good = sum(case.state == "ok" for case in check.cases)
    lines.append(f"{good} of {count_text(len(check.cases), 'tuned model')} fast and accurate enough there")
    return "\n".join(lines)


def _versions(check: UpgradeCheck, backend: str) -> list[str]:
    """The facts of a backend that differ between the environments, or one that states that none does."""
    here, there = check.here[backend], check.there.get(backend, {})
    moved = [key for key in sorted({*here, *there}) if here.get(key) != there.get(key)]
    if not moved:
        return [f"{backend}: both environments report the same versions"]
    return [
        f"{backend}: {plain(key)} {plain(here.get(key, '-'))} here, {plain(there.get(key, '-'))} there"
        for key in moved
    ]


def _row(case: Upgrade) -> tuple[str, ...]:
    change = case.change
    if change is None or case.here_ms is None or case.there_ms is None:
        return plain(case.case, 44), "", "", "", "", "", "", "", case.state
    ratios = [
        "" if ratio is None else ratio_text(ratio.median) for ratio in (case.ratio_here, case.ratio_there)
    ]
    return (
        plain(case.case, 44),
        ms_text(case.here_ms),
        ms_text(case.there_ms),
        ratio_text(change.median),
        interval_text(change),
        *ratios,
        "" if case.sqnr_there_db is None else db_text(case.sqnr_there_db),
        case.state,
    )


def _layer_lines(case: Upgrade) -> list[str]:
    if not case.layers:
        return []
    lines = [f"{plain(case.case)}: {count_text(len(case.layers), 'group')} of kernels changed"]
    for change in case.layers[:MOST_LAYERS]:
        lines.append(
            f"  {_names(change)}: {', '.join(change.kinds)}; "
            f"{ms_text(change.before_ms)} to {ms_text(change.after_ms)} ms"
        )
        if change.before != change.after:
            lines += [f"    - {plain(text, 120)}" for text in change.before]
            lines += [f"    + {plain(text, 120)}" for text in change.after]
    if len(case.layers) > MOST_LAYERS:
        lines.append(f"  and {len(case.layers) - MOST_LAYERS} more; --json lists all")
    return lines


def _names(change: LayerChange) -> str:
    names = (
        change.nodes or tuple(f"conversion of {tensor}" for tensor in change.tensors) or ("unnamed kernel",)
    )
    return plain(list_text(names, _NAMED))
