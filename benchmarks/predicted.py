"""How well searches predict accuracy: rehearsed and measured SQNR of the candidates that they build.

    python benchmarks/predicted.py FOLDER [FOLDER ...] [--names NAME ...] [--min-sqnr-db 20] [--minutes 0.5]

Each trained model that has data (`real_data.py`) is tuned with a limit. Both SQNRs are those of the worst output on the
same samples, as the search compares them; candidates rehearsed on fewer samples are left out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import numpy as np
from real_data import find_models
from tabulate import tabulate

import qdqspec
from qdqspec.accuracy.predict import RehearsalOracle
from qdqspec.types import Trial

HEADS = ("model", "candidates", "measured dB", "median difference", "95 %", "within 1 dB")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--names", nargs="*", default=[])
    parser.add_argument("--min-sqnr-db", type=float, default=20.0)
    parser.add_argument("--minutes", type=float, default=0.5)
    arguments = parser.parse_args()
    rows, pairs = [], list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as scratch:
        for model in find_models(arguments.folders, arguments.names, Path(scratch) / "data"):
            if model.is_random or model.evaluation is None or "qdq" in model.name:
                continue
            with _learning() as oracles:
                qdqspec.tune(
                    model.path,
                    calibration=model.calibration,
                    evaluation=model.evaluation,
                    min_sqnr_db=arguments.min_sqnr_db,
                    minutes=arguments.minutes,
                    output=Path(scratch) / model.name,
                    no_cache=True,
                )
            found = [pair for oracle in oracles for pair in oracle.built.known.values()]
            pairs += found
            rows.append(_row(model.name, found))
            print(tabulate(rows[-1:], floatfmt=".2f"), flush=True)
    print("\n" + tabulate([*rows, _row("all", pairs)], HEADS, floatfmt=".2f"))
    return 0


@contextmanager
def _learning() -> Iterator[list[RehearsalOracle]]:
    """The oracles that learn from builds while this is open."""
    oracles, learn = dict[int, RehearsalOracle](), RehearsalOracle.learn

    def learn_too(oracle: RehearsalOracle, trial: Trial) -> None:
        oracles[id(oracle)] = oracle
        learn(oracle, trial)

    found = list[RehearsalOracle]()
    with patch.object(RehearsalOracle, "learn", learn_too):
        yield found
    found += oracles.values()


def _row(name: str, pairs: list[tuple[float, float]]) -> list:
    if not pairs:
        return [name, 0]
    rehearsed, measured = np.array(pairs).T
    apart = np.abs(rehearsed - measured)
    span = f"{measured.min():.1f} to {measured.max():.1f}"
    return [name, len(pairs), span, np.median(apart), np.percentile(apart, 95), float((apart <= 1).mean())]


if __name__ == "__main__":
    raise SystemExit(main())
