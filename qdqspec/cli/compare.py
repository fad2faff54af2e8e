"""Command ``compare``: two run records case by case, without measuring; or models of several runtimes, timed anew."""

from __future__ import annotations

import argparse
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from qdqspec.cli.folders import add_folder_words, known_of_folder
from qdqspec.cli.words import FINE, WANTING, Verbs, add_verb, answer, complain, settings_from
from qdqspec.errors import ConfigError


def add_verbs(verbs: Verbs) -> None:
    """Declare ``compare``."""
    parser = add_verb(
        verbs,
        "compare",
        compare,
        does="Compare two run records: what became faster or slower; exits 1 where something is proved slower. Of "
        "folders that `tune -o` wrote for one model on several runtimes: build and time their models together.",
        example="qdqspec compare before.json after.json --fail-on 5%\n  qdqspec compare out/first out/second",
        options=("threads", "seed", "device", "build-limit", "backend-option"),
    )
    parser.add_argument(
        "before", type=Path, metavar="RUN_A|DIR", help="A record that --qdq-json wrote, or DIR."
    )
    parser.add_argument(
        "after", type=Path, metavar="RUN_B|DIR", help="A later record of the same device, or DIR."
    )
    parser.add_argument("more", type=Path, nargs="*", metavar="DIR", help="Further folders of results.")
    add_folder_words(parser)
    parser.add_argument(
        "--fail-on",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="Exit 1 only if a model is slower by more than this share, such as 5%% (default: any proved "
        "slowdown).",
    )


def share(text: str) -> float:
    """``5%`` or ``0.05``."""
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("a share of 0 or more is expected, such as 5%")
    return value


def compare(arguments: argparse.Namespace) -> int:
    """Print the table; return 1 if a case is slower by more than ``--fail-on``."""
    given = [arguments.before, arguments.after, *arguments.more]
    if any(path.is_dir() for path in given):
        return _compare_folders(given, arguments)
    if arguments.more:
        raise ConfigError("more than two records are given", cure="compare two of them at a time")
    from qdqspec.report.compare import compare_runs, comparison_text, comparison_to_json
    from qdqspec.report.record import read_record

    found = compare_runs(read_record(arguments.before), read_record(arguments.after))
    answer(arguments, comparison_to_json(found, arguments.fail_on), comparison_text(found))
    beyond = any(case.is_slower_beyond(arguments.fail_on) for case in found.cases)
    return WANTING if beyond else FINE


def _compare_folders(folders: list[Path], arguments: argparse.Namespace) -> int:
    """Time the float and tuned models of results on several runtimes, interleaved, and print their ratios."""
    from qdqspec.codec import to_data
    from qdqspec.report.runtimes import comparison_text
    from qdqspec.session import Session
    from qdqspec.session.compared_runtimes import Side, compare_runtimes

    known = [known_of_folder(folder.absolute(), arguments) for folder in folders]
    for field in ("model", "backend"):
        values = [getattr(each, field) for each in known]
        if len(set(values)) != (1 if field == "model" else len(values)):
            what = "are of different models" if field == "model" else "are of one runtime"
            cure = "name one folder for each runtime, of the same model"
            if field == "backend":
                cure += "; to compare two runs, name the records that `tune --report run.json` writes"
            raise ConfigError(f"these folders {what}: {', '.join(map(str, folders))}", cure=cure)
    with closing(Session(replace(settings_from(arguments), mode="measure"))) as session:
        sides = [
            Side(
                setup=session.work(each.case).setup,
                tuned=each.tuned if each.changed else None,
                scheme=each.scheme,
                pairs=each.pairs,
                sqnr_db=each.sqnr_db,
            )
            for each in known
        ]
        found = compare_runtimes(known[0].name, sides, lambda name, text: complain(f"{name}: {text}"))
    answer(arguments, {"runtimes": [to_data(found)]}, comparison_text(found))
    return FINE
