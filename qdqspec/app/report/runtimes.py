"""Comparisons of several runtimes, and of two versions of one (upgrade check): tables, sentences and JSON."""

from __future__ import annotations

from typing import Any

from qdqspec._core.records import to_data
from qdqspec._core.units import count_text, db_text, interval_text, list_text, ms_text, plain, ratio_text
from qdqspec.app.report.facts import LONG
from qdqspec.app.report.tables import RIGHT, Column, Table, known, median_text
from qdqspec.types import (
    LayerChange,
    RunRecord,
    RuntimeComparison,
    RuntimeModel,
    Upgrade,
    UpgradeCheck,
)

UPGRADE_SCHEMA_VERSION = 1
MOST_LAYERS = 12  # of a case in the text of an upgrade check
_NAMED = 4  # nodes of a change


def tables_of(record: RunRecord) -> list[tuple[Table, list[str]]]:
    """The tables about several runtimes, each with its sentences."""
    return [(_runtimes_table(found), conclusions(found)) for found in record.runtimes]


def runtimes_text(record: RunRecord) -> str:
    """The tables and sentences of all comparisons; empty if there are none."""
    return "\n\n".join(map(comparison_text, record.runtimes))


def comparison_text(found: RuntimeComparison) -> str:
    """The table and sentences of one comparison."""
    table = _runtimes_table(found)
    return "\n".join([table.title, table.text, *conclusions(found)])


# ---- the models of all runtimes ------------------------------------------------------------------


def _runtimes_table(found: RuntimeComparison) -> Table:
    """Each model of each runtime, the fastest first; models that were not timed are last."""

    def interval(model: RuntimeModel) -> str:
        return "" if model.label == found.reference else known(interval_text, model.ratio)

    def sqnr(model: RuntimeModel) -> str:
        return "" if model.ratio is None else known(db_text, model.sqnr_db)

    def pairs(model: RuntimeModel) -> str:
        return str(model.pairs) if model.ratio is not None and model.model == "tuned" else ""

    def remarks(model: RuntimeModel) -> str:
        if model.ratio is None:
            return f"not timed: {plain(model.failure, 80)}"
        words = ["reference"] if model.label == found.reference else []
        if model.label == found.winner:
            words.append("fastest")
        elif model in found.tied:
            words.append("not proved slower")
        if model.limit_db is not None:
            words.append(f"below {model.limit_db:g} dB")
        return ", ".join(words)

    builds = count_text(found.builds, "build")
    return Table.of(
        f"Runtimes of {plain(found.name)} ({found.clock} clock, {builds} each, interleaved; reference: "
        f"{plain(found.reference)})",
        sorted(found.models, key=lambda m: (m.ratio is None, m.ratio.median if m.ratio else 0.0)),
        Column("runtime", lambda model: plain(model.target, 30)),
        Column("model", lambda model: model.model),
        Column("ms", lambda model: known(ms_text, model.median_ms), RIGHT),
        Column("of reference", lambda model: median_text(model.ratio), RIGHT),
        Column("95 % interval", interval),
        Column("SQNR dB", sqnr, RIGHT),
        Column("pairs", pairs, RIGHT),
        Column("", remarks),
    )


def conclusions(found: RuntimeComparison) -> list[str]:
    """Sentences: the winner, models not proved slower, and float models that are faster than a tuned model."""
    winner = found.named(found.winner)
    assert winner.ratio is not None  # a winner was timed
    head = f"fastest that meets the accuracy limits: {_text(winner)}"
    if winner.label != found.reference:
        head += (
            f", {ratio_text(winner.ratio.median)} of the time of {plain(found.reference)} "
            f"(95 %: {interval_text(winner.ratio)})"
        )
    lines = [f"{plain(found.name)}: {head}"]
    if found.tied:
        lines.append(f"not proved slower than it: {', '.join(_text(model) for model in found.tied)}")
    lines += [  # the intervals, over the same reference, exclude that the second is as fast
        f"{_text(fast)} is faster than {_text(slow)}"
        for fast in found.models
        for slow in found.models
        if fast.model == "float" and slow.model == "tuned"
        if fast.ratio and slow.ratio and fast.ratio.high < slow.ratio.low
    ]
    lines += [f"{_text(m)} was not timed: {plain(m.failure, LONG)}" for m in found.models if m.failure]
    return lines


def _text(model: RuntimeModel) -> str:
    return f"{'the model tuned for' if model.model == 'tuned' else 'float on'} {plain(model.target)}"


# ---- two versions of a runtime -------------------------------------------------------------------


def upgrade_to_json(check: UpgradeCheck) -> dict[str, Any]:
    """The check as data; times are in milliseconds, ratios have their 95 % interval."""
    return {"schema_version": UPGRADE_SCHEMA_VERSION, "passed": check.passed, **to_data(check)}


def upgrade_text(check: UpgradeCheck) -> str:
    """Versions, a row for each case, the layers that changed, and a summary."""
    lines = [line for backend in check.here for line in _version_lines(check, backend)]
    lines.append(_upgrade_table(check).text)
    lines += [line for case in check.cases for line in _layer_lines(case)]
    lines += [f"{plain(c.case)}: {c.state}: {plain(c.reason, 400)}" for c in check.cases if c.state != "ok"]
    good = sum(case.state == "ok" for case in check.cases)
    lines.append(f"{good} of {count_text(len(check.cases), 'tuned model')} fast and accurate enough there")
    return "\n".join(lines)


def _version_lines(check: UpgradeCheck, backend: str) -> list[str]:
    """A line for each fact of a backend that differs between the environments, or one line that all facts are equal."""
    here, there = check.here[backend], check.there.get(backend, {})
    return [
        f"{backend}: {plain(key)} {plain(here.get(key, '-'))} here, {plain(there.get(key, '-'))} there"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key)
    ] or [f"{backend}: both environments report the same versions"]


def _upgrade_table(check: UpgradeCheck) -> Table:
    return Table.of(
        "",
        check.cases,
        Column("case", lambda case: plain(case.case, 44)),
        Column("here ms", lambda case: known(ms_text, case.here_ms)),
        Column("there ms", lambda case: known(ms_text, case.there_ms)),
        Column("change", lambda case: median_text(case.change)),
        Column("95 % interval", lambda case: known(interval_text, case.change)),
        Column("of float here", lambda case: median_text(case.ratio_here)),
        Column("there", lambda case: median_text(case.ratio_there)),
        Column("SQNR dB", lambda case: known(db_text, case.sqnr_there_db)),
        Column("", lambda case: case.state),
    )


def _layer_lines(case: Upgrade) -> list[str]:
    if not case.layers:
        return []
    lines = [f"{plain(case.case)}: {count_text(len(case.layers), 'group')} of kernels changed"]
    for change in case.layers[:MOST_LAYERS]:
        moved = f"{ms_text(change.before_ms)} to {ms_text(change.after_ms)} ms"
        lines.append(f"  {_names(change)}: {', '.join(change.kinds)}; {moved}")
        if change.before != change.after:
            lines += [f"    - {plain(text, 120)}" for text in change.before]
            lines += [f"    + {plain(text, 120)}" for text in change.after]
    if len(case.layers) > MOST_LAYERS:
        lines.append(f"  and {len(case.layers) - MOST_LAYERS} more; --json lists all")
    return lines


def _names(change: LayerChange) -> str:
    converted = [f"conversion of {tensor}" for tensor in change.tensors]
    return plain(list_text(change.nodes or converted or ("unnamed kernel",), _NAMED))
