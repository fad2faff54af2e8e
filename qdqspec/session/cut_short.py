"""The steps that a search did not reach before its limit, and the option that raises the limit."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from qdqspec.search.select import is_candidate
from qdqspec.types import Trial, TuneRules
from qdqspec.units import count_text


def cut_short_text(
    ended_by: str,
    trials: Sequence[Trial],
    rules: TuneRules,
    *,
    usual: int,
    steps: Mapping[str, str],
    untried: Collection[str] = (),
) -> str:
    """A search that ended at a limit: the candidates built, the steps not reached, and the option to raise.

    ``usual`` is the number of candidates of a search without a time limit, ``steps`` are the phases of the strategy in
    their order, and ``untried`` the corrections that were not tried. Empty if no limit ended the search.
    """
    if not ended_by:
        return ""
    built = len({t.placement.digest for t in trials if is_candidate(t)})
    phases = {trial.phase for trial in trials if trial.placement.sites}
    reached = max((number for number, phase in enumerate(steps) if phase in phases), default=-1)
    missing = list(steps.values())[reached + 1 :]
    if untried:
        missing.append(f"corrections ({', '.join(untried)})")
    candidates = count_text(max(built, usual), "candidate")
    of = f"{built} of about {candidates}" if usual > built else candidates
    parts = [
        f"the search ended at {ended_by}, before it was done: {of} built",
        f"not reached: {', '.join(missing)}" if missing else "",
        f"give it more with {_cure(ended_by, built, rules, usual)}",
    ]
    return ", ".join(filter(None, parts))


def _cure(ended_by: str, built: int, rules: TuneRules, usual: int) -> str:
    """The option that raises the limit, with a value."""
    if "run" in ended_by:
        return "--qdq-time-limit"
    if "build" in ended_by:
        return f"--trials {2 * usual} (tune.trials)"
    minutes = rules.minutes or 1.0
    asked = minutes * min(max(2.0, usual / max(built, 1)), 10.0)
    shown = math.ceil(asked) if asked > 2 else math.ceil(2 * asked) / 2
    return f"--minutes {shown:g} (tune.minutes)"
