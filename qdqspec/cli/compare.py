"""Command ``compare``: compare two run records case by case. It reads JSON only; nothing is measured."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec.cli.words import FINE, WANTING, add_verb, say, say_json

if TYPE_CHECKING:
    from qdqspec.cli.words import Verbs


def add_verbs(verbs: Verbs) -> None:
    """Declare ``compare``."""
    parser = add_verb(
        verbs,
        "compare",
        compare,
        does="Compare two run records: what became faster or slower. Exits 1 where something is proved slower.",
        example="qdqspec compare before.json after.json --fail-on 5%",
    )
    parser.add_argument("before", type=Path, metavar="RUN_A", help="A record that --qdq-json wrote.")
    parser.add_argument("after", type=Path, metavar="RUN_B", help="A later one, of the same device.")
    parser.add_argument(
        "--fail-on",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="Exit 1 only where it is slower by more than this, such as 5%% (default: any proved slowdown).",
    )


def share(text: str) -> float:
    """``5%`` or ``0.05``."""
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("a share of 0 or more is expected, such as 5%")
    return value


def compare(arguments: argparse.Namespace) -> int:
    """Print the table; return 1 if a case is slower by more than ``--fail-on``."""
    from qdqspec.report.compare import compare_runs, comparison_text, comparison_to_json
    from qdqspec.report.record import read_record

    found = compare_runs(read_record(arguments.before), read_record(arguments.after))
    if arguments.json:
        say_json(comparison_to_json(found, arguments.fail_on))
    else:
        say(comparison_text(found))
    beyond = any(case.is_slower_beyond(arguments.fail_on) for case in found.cases)
    return WANTING if beyond else FINE
