"""Explains in words where the difference between two models comes from."""

from __future__ import annotations

import math

from qdqspec.checks._parity_limits import LIMITS, NAME_WIDTH
from qdqspec.types import Culprit, CulpritEvidence, ParityEvidence, Section, TensorParity
from qdqspec.units import count_text, pair_text, plain, share_text

_BOTH = 2.0  # steps whose error differs by less than this factor are both named
_CULPRITS = 3  # pairs that a verdict lists
_HELPS_DB = 1.0  # least gain of excluding them to advise it
_NAMED, _NODE_WIDTH = 6, 40  # nodes that the advice names
_MOST_DB = 300.0  # beyond, powers of ten exceed the range of a float
QUANTIZATION, RUNTIME = "quantization", "the runtime"


def blame(parity: ParityEvidence, output: str) -> str:
    """``quantization``, ``the runtime``, or both; empty if they were not measured separately."""
    noise = _noise(parity, output)
    if noise is None:
        return ""
    quantization, runtime = noise
    if max(quantization, runtime) == 0:
        return ""
    if quantization >= _BOTH * runtime:
        return QUANTIZATION
    return RUNTIME if runtime >= _BOTH * quantization else "quantization and runtime"


def steps_table(parity: ParityEvidence, output: str) -> tuple[Section, ...]:
    """The steps from the float model to what runs, for one output, with the error of each."""
    noise = _noise(parity, output)
    if noise is None:
        return _undivided(parity)
    rows = []
    for name, outputs, own in (
        ("quantization: float model > Q/DQ arithmetic", parity.quantization, noise[0]),
        ("runtime: Q/DQ arithmetic > as it runs", parity.runtime, noise[1]),
        ("both: float model > as it runs", parity.outputs, None),
    ):
        out = _named(outputs, output)
        assert out is not None
        rows.append((name, *(limit.text(getattr(out, limit.fact)) for limit in LIMITS), _share(own, noise)))
    return (
        Section(
            title=f"Where the difference of '{plain(output, NAME_WIDTH)}' comes from",
            headers=("step", *(limit.title for limit in LIMITS), "of the noise"),
            rows=tuple(rows),
        ),
    )


def culprits_table(found: CulpritEvidence | None) -> tuple[Section, ...]:
    """The pairs that cost most, and the gain of keeping their nodes in float."""
    if found is None or not found.pairs:
        return ()
    return (
        Section(
            title=f"Noisiest of {count_text(found.total, 'Q/DQ pair')} at '{plain(found.output, NAME_WIDTH)}' "
            f"({found.together_db:.1f} dB together, over {count_text(found.samples, 'sample')})",
            headers=("pair", "alone", "of the noise", "without these nodes so far"),
            rows=tuple(_culprit_row(culprit) for culprit in found.pairs[:_CULPRITS]),
        ),
    )


def _culprit_row(culprit: Culprit) -> tuple[str, ...]:
    without = "" if culprit.without_db is None else f"{culprit.without_db:.1f} dB"
    return (pair_text(culprit.site), f"{culprit.alone_db:.1f} dB", share_text(culprit.share), without)


def advice(output: str, step: str, culprits: CulpritEvidence | None = None) -> str:
    """Advice for an output, by the step and the pairs that cause its error."""
    name = plain(output, NAME_WIDTH)
    if step == RUNTIME:
        return (
            f"The Q/DQ arithmetic of '{name}' is close enough, and the runtime leaves it: it saturates, rounds or "
            "fuses otherwise. See what it runs in integers (qdqspec explain) and what may saturate (qdqspec lint), "
            "exclude these nodes (patterns.nodes.exclude), or have it rewrite less (--qdq-backend-option)."
        )
    where = " in its Q/DQ arithmetic, before any runtime" if step == QUANTIZATION else ""
    return (
        f"Output '{name}' moved most{where}. {_which_nodes(culprits)}, "
        "set tune.min_sqnr_db, try another quantize.calibration, or accept less."
    )


def _which_nodes(culprits: CulpritEvidence | None) -> str:
    """The nodes to exclude: those of the noisiest pairs if that helps, else those before the output."""
    found = culprits.pairs[:_CULPRITS] if culprits is not None else ()
    gains = [culprit.without_db for culprit in found if culprit.without_db is not None]
    if culprits is None or not gains or max(gains) < culprits.together_db + _HELPS_DB:
        spread = "No few pairs make most of the noise: exclude" if gains else "Exclude"
        return (
            f"{spread} layers before it (patterns.nodes.exclude; qdqspec explain CASE --culprits lists pairs)"
        )
    worst = found[: gains.index(max(gains)) + 1]
    nodes = dict.fromkeys(plain(node, _NODE_WIDTH) for culprit in worst for node in culprit.nodes)
    named = list(nodes)[:_NAMED] + [f"{len(nodes) - _NAMED} more"] * (len(nodes) > _NAMED)
    where = [f"exclude {', '.join(named)} (patterns.nodes.exclude)"] if nodes else []
    where += ["leave graph outputs in float (quantize.outputs)"] if any(c.makes_output for c in worst) else []
    return f"For {max(gains):.1f} dB {' and '.join(where)}"


def _noise(parity: ParityEvidence, output: str) -> tuple[float, float] | None:
    """Error power over signal power of the two steps, if both are known; infinite if incomparable."""
    steps = _named(parity.quantization, output), _named(parity.runtime, output)
    if any(out is None or not out.compared for out in steps):
        return None
    quantization, runtime = (_power(out) for out in steps if out is not None)
    return quantization, runtime


def _power(out: TensorParity) -> float:
    if not out.matches or not out.sqnr_db > -math.inf:  # also true for NaN
        return math.inf
    return 0.0 if out.sqnr_db == math.inf else 10.0 ** (-max(-_MOST_DB, min(out.sqnr_db, _MOST_DB)) / 10)


def _named(outputs: tuple[TensorParity, ...], name: str) -> TensorParity | None:
    return next((out for out in outputs if out.name == name), None)


def _share(own: float | None, noise: tuple[float, float]) -> str:
    whole = sum(noise)
    if own is None or not 0 < whole < math.inf:
        return ""
    return share_text(own / whole)


def _undivided(parity: ParityEvidence) -> tuple[Section, ...]:
    if not parity.undivided:
        return ()
    title = "What quantization costs and what the runtime costs was not told apart"
    return (Section(title=title, text=plain(parity.undivided, 200)),)
