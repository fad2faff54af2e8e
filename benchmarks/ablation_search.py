"""One search of `benchmarks/ablation.py`, in a process of its own: ``python ablation_search.py JSON``.

It uses public functions of qdqspec only, so that another version can run it; a step that is left out is replaced by one
that does nothing. The last line of standard output is JSON: builds, runs of float, processor seconds, selected file.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Methods of the default strategy that yield proposals, by the name of the phase in the table.
PHASES = {
    "simple placements": "simple",
    "rough noise": "roughly_thinned",
    "recomposed": "recomposed",
    "compose": "_compose",
    "trade": "_apply_accuracy",
    "approach": "_approach_limit",
    "sample": "_sample",
    "flips": "_flip",
    "repair": "",
    "first placement": "",
}
CORRECTIONS = ("corrections", "bias", "bits", "equalization", "margins", "ranges", "rounding")


def main() -> int:
    """Search as asked by the JSON of the first argument."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    import qdqspec

    without, output = asked.pop("without"), Path(asked.pop("output"))
    _leave_out(without)
    if without == "corrections":
        asked["corrections"] = "none"
    elif without in CORRECTIONS:
        from qdqspec.types import CORRECTIONS as KNOWN

        asked["corrections"] = [name for name in KNOWN if name != without]
    given = {word: value for word, value in asked.items() if value not in (None, {}, "None")}
    path = given.pop("model")
    with (
        tempfile.TemporaryDirectory() as cache,
        Path(os.devnull).open("w") as nowhere,
        contextlib.redirect_stdout(nowhere),
    ):
        result = qdqspec.tune(path, output=output, cache_dir=Path(cache), no_cache=True, **given)
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found = {
        "unchanged": result.unchanged,
        "builds": result.search.total,
        "runs": result.search.float_runs,
        "seconds": result.search.seconds,
        "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in spent),
        "tuned": "" if result.unchanged else str(result.model),
    }
    print(json.dumps(found))
    return 0


def _leave_out(step: str) -> None:
    """Replace a phase by one that proposes nothing."""
    if step not in PHASES:
        return
    if step == "repair":
        from qdqspec.session.tuning import Tuning

        Tuning.repair = lambda _: None  # type: ignore[method-assign] # the purpose of this program
    elif step == "first placement":
        from qdqspec.session import tuning

        tuning._first_trials = lambda *_: tuning._First([])  # noqa: SLF001 - the purpose of this program
    elif step:
        from qdqspec.search.attribution import Attribution

        def nothing(*_: object, **__: object) -> Iterator[Any]:
            return []  # type: ignore[return-value] # the value of a generator
            yield

        setattr(Attribution, PHASES[step], nothing)


if __name__ == "__main__":
    sys.exit(main())
