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
from pathlib import Path
from typing import Any

from metric_limit import metric_options
from real_data import RealModel

PHASES = ("uniform", "leave_out", "compose", "flip")  # `Attribution.phases`
CORRECTIONS = ("corrections", "bias", "bits", "equalization", "ranges")


def main() -> int:
    """Search as asked by the JSON of the first argument."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    import qdqspec

    without, output = asked.pop("without").split("+"), Path(asked.pop("output"))
    for step in without:
        _leave_out(step)
    asked |= _options(asked.pop("limit"), asked.pop("name"), asked.pop("judged"), asked, output)
    if "corrections" in without:
        asked["corrections"] = "none"
    elif set(without) & set(CORRECTIONS):
        from qdqspec.types import CORRECTIONS as KNOWN

        asked["corrections"] = [name for name in KNOWN if name not in without]
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


def _options(limit: str, name: str, judged: str, asked: dict[str, Any], output: Path) -> dict[str, Any]:
    """The options of `qdqspec.tune` for a limit."""
    if limit != "metric":
        return {"min_sqnr_db": float(limit)}
    path, calibration, evaluation = (Path(asked[key]) for key in ("model", "calibration", "evaluation"))
    model = RealModel(name=name, path=path, judged=judged, calibration=calibration, evaluation=evaluation)
    return metric_options(model, output.with_suffix(".npz"))


def _leave_out(step: str) -> None:
    """Take a phase out of the default strategy."""
    if step in PHASES:
        from qdqspec.search.strategies.attribution import Attribution

        Attribution.phases = [phase for phase in Attribution.phases if phase.__name__ != step]


if __name__ == "__main__":
    sys.exit(main())
