"""Renders the ranking of Q/DQ pairs by accuracy cost, as text and as JSON."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from qdqspec._core.records import to_data
from qdqspec._core.units import count_text, pair_text, plain, share_text
from qdqspec.app.report.tables import RIGHT, Column, Table, known
from qdqspec.types import CulpritEvidence

_LEGEND = (
    "alone: the SQNR with this pair only.\n"
    "without: the SQNR if the nodes of this row and of the rows above read floats.\n"
    "Computed as ONNX defines it, unfused; the runtime error is not included."
)


def culprits_text(found: CulpritEvidence) -> str:
    """The ranking, its interpretation, and the SQNR without the worst pairs."""
    if not found.pairs:
        return f"The error cannot be attributed to pairs: {plain(found.missing or 'there is no noise')}."
    table = Table.of(
        "",
        found.pairs,
        Column("pair", lambda culprit: pair_text(culprit.site)),
        Column("kind", lambda culprit: "weight" if culprit.site.weight else "activation"),
        Column("format", lambda culprit: plain(culprit.site.format)),
        Column("alone dB", lambda culprit: f"{culprit.alone_db:.1f}", RIGHT),
        Column("of the noise", lambda culprit: share_text(culprit.share), RIGHT),
        Column("without dB", lambda culprit: known("{:.1f}".format, culprit.without_db), RIGHT),
    )
    if others := found.total - len(found.pairs):
        name = "the other" if others == 1 else f"the other {others}"
        table = replace(table, rows=(*table.rows, (name, "", "", "", share_text(found.rest), "")))
    head = (
        f"{plain(found.output)}: {found.together_db:.1f} dB SQNR with {count_text(found.total, 'Q/DQ pair')} "
        f"({count_text(found.samples, 'sample')} of {found.data} data)"
    )
    parts = [head, _contradiction(found), table.text, _LEGEND, _spread(found), _removal(found)]
    if found.missing:
        parts.append(f"note: {plain(found.missing)}, so that fewer pairs than requested are listed")
    return "\n\n".join(part for part in parts if part)


def culprits_json(found: CulpritEvidence) -> dict[str, Any]:
    """The ranking as an object."""
    return {
        **to_data(found),
        "missing": found.missing or None,
        "legend": _LEGEND,
        "words": [words for words in (_contradiction(found), _spread(found), _removal(found)) if words]
        if found.pairs
        else [culprits_text(found)],
        "pairs": [
            {
                **to_data(culprit.site),
                "consumers": [end._asdict() for end in culprit.site.consumers],
                "alone_db": culprit.alone_db,
                "share": culprit.share,
                "without_db": culprit.without_db,
            }
            for culprit in found.pairs
        ],
    }


def _contradiction(found: CulpritEvidence) -> str:
    """A sentence if the figures are not those of the quantized model; empty if they are."""
    if found.holds():
        return ""
    return (
        f"The figures do not hold for the quantized model, which has {found.model_db:.1f} dB itself: it has nodes or "
        "weights that the float model lacks, or pairs that cannot be measured alone. `qdqspec diff` lists them; "
        "without --reference the float model is the quantized one without its pairs."
    )


def _spread(found: CulpritEvidence) -> str:
    """A sentence on whether a few pairs cause most of the error."""
    removed = [culprit for culprit in found.pairs if culprit.without_db is not None]
    share = sum(culprit.share for culprit in removed)
    which = "noisiest pair makes" if len(removed) == 1 else f"{len(removed)} noisiest pairs make"
    what = f"The {which} {share_text(share)} of the noise"
    if share >= 0.5:
        return f"{what}: exclude them, or use another format for them."
    return (
        f"{what}. The error is spread over many pairs: another calibration, or fewer pairs in total, "
        "may reduce it more."
    )


def _removal(found: CulpritEvidence) -> str:
    """The lines of a spec that exclude the worst nodes, and the SQNR gained."""
    gains = [culprit.without_db for culprit in found.pairs if culprit.without_db is not None]
    if not gains or max(gains) <= found.together_db:
        return "" if not gains else "Keeping their nodes in float does not help: their errors cancel others."
    worst = found.pairs[: gains.index(max(gains)) + 1]
    nodes = []
    for node in dict.fromkeys(node for culprit in worst for node in culprit.nodes):
        glob = "".join(f"[{sign}]" if sign in "*?[" else sign for sign in plain(node))
        escaped = glob.replace("\\", "\\\\").replace('"', '\\"')
        nodes.append(f'        - "{escaped}"')
    lines = [f"For {max(gains):.1f} dB instead of {found.together_db:.1f} dB:"]
    if nodes:
        lines += [
            "  patterns:",
            "    nodes:",
            "      exclude:",
            *nodes,
        ]
    if any(culprit.makes_output for culprit in worst):
        lines += ["  quantize:", "    outputs: false"]
    return "\n".join(lines)
