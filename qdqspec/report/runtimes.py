"""The comparison of several runtimes, as a table and sentences."""

from __future__ import annotations

from typing import Any

from qdqspec.report.facts import LONG, Table, grid
from qdqspec.types import CommonPlacement, RunRecord, RuntimeComparison, RuntimeModel
from qdqspec.units import count_text, db_text, interval_text, ms_text, plain, ratio_text

TUNE_SCHEMA_VERSION = 1
TUNE = "tune.json"  # beside the folders of the cases


def runtimes_table(found: RuntimeComparison) -> Table:
    """Each model of each runtime, fastest first; those that were not timed last."""
    ranked = sorted(found.models, key=lambda m: (m.ratio is None, m.ratio.median if m.ratio else 0.0))
    builds = count_text(found.builds, "build")
    return Table(
        f"Runtimes of {plain(found.name)} ({found.clock} clock, {builds} each, interleaved; reference: "
        f"{plain(found.reference)})",
        ("runtime", "model", "ms", "of reference", "95 % interval", "SQNR dB", "pairs", ""),
        tuple(_row(found, model) for model in ranked),
        frozenset({2, 3, 5, 6}),
    )


def _row(found: RuntimeComparison, model: RuntimeModel) -> tuple[str, ...]:
    name = plain(model.target, 30), model.model
    if model.ratio is None or model.median_ms is None:
        return (*name, "", "", "", "", "", f"not timed: {plain(model.failure, 80)}")
    is_reference = model.label == found.reference
    tuned = model.model == "tuned"
    return (
        *name,
        ms_text(model.median_ms),
        ratio_text(model.ratio.median),
        "" if is_reference else interval_text(model.ratio),
        db_text(model.sqnr_db) if model.sqnr_db is not None else "",
        str(model.pairs) if tuned else "",
        ", ".join(_remarks(found, model)),
    )


def _remarks(found: RuntimeComparison, model: RuntimeModel) -> list[str]:
    words = ["reference"] if model.label == found.reference else []
    if model.label == found.winner:
        words.append("fastest")
    elif model in found.tied:
        words.append("not proved slower")
    if model.limit_db is not None:
        words.append(f"below {model.limit_db:g} dB")
    return words


def conclusions(found: RuntimeComparison) -> list[str]:
    """Sentences: the winner, models not proved slower, and float models that are faster than a tuned model."""
    winner = found.named(found.winner)
    assert winner.ratio is not None  # a winner was timed
    said = f"fastest that meets the accuracy limits: {_text(winner)}"
    if winner.label != found.reference:
        said += (
            f", {ratio_text(winner.ratio.median)} of the time of {plain(found.reference)} "
            f"(95 %: {interval_text(winner.ratio)})"
        )
    lines = [f"{plain(found.name)}: {said}"]
    if found.tied:
        lines.append(f"not proved slower than it: {', '.join(_text(model) for model in found.tied)}")
    lines += [
        f"{_text(fast)} is faster than {_text(slow)}"
        for fast in found.models
        for slow in found.models
        if fast.model == "float" and slow.model == "tuned" and _is_faster(fast, slow)
    ]
    lines += [f"{_text(m)} was not timed: {plain(m.failure, LONG)}" for m in found.models if m.failure]
    return lines


def _is_faster(one: RuntimeModel, other: RuntimeModel) -> bool:
    """Whether the intervals of two models, over the same reference, exclude that the second is as fast."""
    return one.ratio is not None and other.ratio is not None and one.ratio.high < other.ratio.low


def _text(model: RuntimeModel) -> str:
    return f"{'the model tuned for' if model.model == 'tuned' else 'float on'} {plain(model.target)}"


def common_table(found: CommonPlacement) -> Table:
    """The common placement on each runtime, beside the best model of that runtime's own search."""
    rows = tuple(
        (
            plain(each.target, 30),
            f"{each.weight:.2f}",
            ratio_text(each.ratio.median),
            interval_text(each.ratio),
            ratio_text(each.own.median) + (" (float)" if each.own_unchanged else ""),
            ratio_text(each.loss.median),
            interval_text(each.loss),
            "" if each.sqnr_db is None else db_text(each.sqnr_db),
        )
        for each in found.targets
    )
    builds = count_text(found.builds, "build")
    return Table(
        f"One placement for several runtimes of {plain(found.name)} ({found.clock} clock, {builds} each, interleaved)",
        (
            "runtime",
            "weight",
            "of float",
            "95 % interval",
            "own best",
            "over own",
            "95 % interval",
            "SQNR dB",
        ),
        rows,
        frozenset({1, 2, 5, 7}),
    )


def common_conclusions(found: CommonPlacement) -> list[str]:
    """The placement and its mean, or why there is none; and how the best of each runtime were found."""
    timed = count_text(found.candidates, "candidate")
    if found.unchanged:
        said = f"{plain(found.name)}: no common placement: {plain(found.reason, LONG)} ({timed} timed on all runtimes)"
        return [said]
    said = (
        f"{plain(found.name)}: one placement of {count_text(found.pairs, 'pair')}, from the space of "
        f"{plain(found.origin)}: weighted mean {ratio_text(found.mean.median)} of float "
        f"(95 %: {interval_text(found.mean)}); {timed} timed on all runtimes"
    )
    searches = (
        f"{plain(t.target)} by a search of {count_text(t.own_builds, 'build')}" for t in found.targets
    )
    return [said, f"own best: {', '.join(searches)}, timed again here; a longer search may find a better one"]


def tables_of(record: RunRecord) -> list[tuple[Table, list[str]]]:
    """The tables about several runtimes, each with its sentences."""
    compared = [(runtimes_table(found), conclusions(found)) for found in record.runtimes]
    return compared + [(common_table(found), common_conclusions(found)) for found in record.common]


def runtimes_text(record: RunRecord) -> str:
    """The tables and sentences of all comparisons; empty if there are none."""
    return "\n\n".join(_text_of(table, said) for table, said in tables_of(record))


def comparison_text(found: RuntimeComparison) -> str:
    """The table and sentences of one comparison."""
    return _text_of(runtimes_table(found), conclusions(found))


def _text_of(table: Table, said: list[str]) -> str:
    rows = [grid(table.headers, table.rows, table.align)] if table.rows else []
    return "\n".join([table.title, *rows, *said])


def tune_to_json(
    version: str, found: list[dict[str, Any]], files: dict[str, str], common: list[dict[str, Any]]
) -> dict[str, Any]:
    """The content of ``tune.json``: comparisons as in the run record, and the file of each winner by name."""
    return {
        "schema_version": TUNE_SCHEMA_VERSION,
        "qdqspec": version,
        "runtimes": found,
        "winners": files,
        "common": common,
    }
