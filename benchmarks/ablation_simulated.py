"""The worth of each phase of the default strategy on simulated devices, whose best placements are known.

    python benchmarks/ablation_simulated.py [--seeds 10] [--devices usual loud] [--limit none] [--best]

Each family of models of `families.py` is searched with each seed by all variants. A line has the true time of the
selected placements over those of the whole search, as a geometric mean, and builds; with ``--best`` also the true time
over that of the best placement known. The limit is an SQNR in dB: the device has no times of its own, but computes
outputs. No time of this machine counts, so that any number of other processes may run beside it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import families
import onnx
import simulation
from ablation_search import PHASES
from tabulate import tabulate

from qdqspec.search.strategies.attribution import Attribution
from qdqspec.types import Case

WHOLE = "whole"


def main() -> int:
    """Print one line for each variant."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--devices", nargs="+", default=["usual", "loud"])
    parser.add_argument("--without", nargs="*", choices=PHASES, default=PHASES)
    parser.add_argument("--limit", default="none", help="SQNR in dB, or none")
    parser.add_argument("--best", action="store_true", help="find the best placement (minutes a model)")
    asked = parser.parse_args()
    whole = Attribution.phases
    ratios: dict[str, list[float]] = defaultdict(list)
    builds: dict[str, list[int]] = defaultdict(list)
    best: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for family in (families.resnet, families.mobilenet, families.transformer):
            path = Path(folder) / f"{family.__name__}.onnx"
            onnx.save(family(), path)
            case = Case(id="default", model=path)
            limit = "none" if asked.limit == "none" else float(asked.limit)
            ready = simulation.prepared(replace(case, tune=replace(case.tune, min_sqnr_db=limit)))
            for device in asked.devices:
                for seed in range(asked.seeds):
                    words = simulation.DEVICES[device]
                    if asked.best:
                        best.append(simulation.Truth(ready, {**words, "fake.seed": str(seed)}).best())
                    for variant in (WHOLE, *asked.without):
                        Attribution.phases = [phase for phase in whole if phase.__name__ != variant]
                        found = simulation.search(ready, words, seed)
                        ratios[variant].append(1.0 if found.unchanged else found.true)
                        builds[variant].append(len(found.trials))
                print(path.stem, device, {v: f"{_mean(r):.3f}" for v, r in ratios.items()}, file=sys.stderr)
    rows = [
        (
            variant,
            len(found),
            _mean([one / other for one, other in zip(found, ratios[WHOLE], strict=True)]),
            _mean([one / other for one, other in zip(found, best, strict=True)]) if best else None,
            _mean(builds[variant]) / _mean(builds[WHOLE]),
        )
        for variant, found in ratios.items()
    ]
    headers = ("without", "searches", "time", "over the best", "builds")
    print(tabulate(rows, headers, tablefmt="pipe", floatfmt=".3f"))
    return 0


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    sys.exit(main())
