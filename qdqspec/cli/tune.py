"""Verb ``tune``: the search outside a test run, through the same session as pytest's."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qdqspec import registry
from qdqspec.cases import find_cases
from qdqspec.cli.words import (
    FINE,
    IMPOSSIBLE,
    WANTING,
    add_verb,
    complain,
    refuse_input_as_output,
    say,
    say_json,
    settings_from,
    shapes,
    values,
    writable_folder,
)
from qdqspec.config import Settings, find_folder, note_owner, other_owner
from qdqspec.errors import BackendUnavailableError, ConfigError, OutputError, QdqspecError
from qdqspec.files import RESULT, explained
from qdqspec.progress import Bar, Display, Heartbeat
from qdqspec.types import Case, CheckResult, RunRecord
from qdqspec.units import fraction

if TYPE_CHECKING:
    from qdqspec.cli.words import Verbs
    from qdqspec.session import Session

_WRITTEN = ("reference.onnx", "tuned.onnx", "tuned_raw.onnx")  # the models that a run leaves
_OPTIONS = (
    "backend", "device", "mode", "threads", "jobs", "seed", "time-limit", "require", "scheme", "cache-dir", "no-cache",
    "retune",
    "report", "allow-path", "baseline", "backend-option", "plugin", "trtexec-args",
)  # fmt: skip


def add_verbs(verbs: Verbs) -> None:
    """Declare ``tune``."""
    parser = add_verb(
        verbs,
        "tune",
        tune,
        does="Search the fastest Q/DQ placement of a model, or of every case of a spec.",
        example="qdqspec tune model.onnx --calibration data.npz --minutes 5 -o tuned/",
        options=_OPTIONS,
    )
    parser.add_argument("what", metavar="SPEC|MODEL", help="A spec, one case of it (file::case), or a model.")
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="Where to put models and results.")
    parser.add_argument("--quant", metavar="FORMAT", help="Number format (default of a model: int8).")
    parser.add_argument(
        "--calibration", type=Path, metavar="NPZ", help="Data to take activation ranges from."
    )
    parser.add_argument(
        "--shapes",
        type=shapes,
        metavar="NAME:1x3x224x224",
        help="Shapes of inputs whose dimensions are dynamic; several with commas.",
    )
    parser.add_argument(
        "--values",
        type=values,
        metavar="NAME:16000",
        help="Inputs fixed to a number, true or false, which the tuned model does not have; several with commas.",
    )
    parser.add_argument(
        "--scales", type=Path, metavar="FILE", help="Ranges known already: a calibration cache, or JSON."
    )
    parser.add_argument("--strategy", metavar="NAME", help="Search strategy (default: attribution).")
    parser.add_argument("--preset", choices=("quick", "default", "extensive"), help="Size of the search.")
    parser.add_argument("--trials", type=_positive(int), metavar="N", help="At most so many builds.")
    parser.add_argument("--minutes", type=_positive(float), metavar="M", help="At most so long.")
    parser.add_argument(
        "--min-sqnr-db",
        type=_sqnr_limit,
        metavar="DB|none",
        help="Smallest SQNR of what is selected (default: 20 without a task metric); none lifts the limit.",
    )
    parser.add_argument(
        "--min-gain",
        type=_gain,
        metavar="SHARE",
        help="Share of the time that what is selected is proved to save, as 0.02 or 2%% (default: 2%%).",
    )


def _positive(number: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        value = number(text)
        if not value > 0:
            raise argparse.ArgumentTypeError("it must be more than 0")
        return value

    parse.__name__ = number.__name__  # what argparse calls it in its message
    return parse


def _sqnr_limit(text: str) -> float | Literal["none"]:
    if text == "none":
        return "none"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}' is neither a number of decibels nor none")
    return value


def _gain(text: str) -> float:
    try:
        value = float(str(fraction(text)))
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no share such as 2% or 0.02")
    return value


def tune(arguments: argparse.Namespace) -> int:
    """Tune every case; 1 where a check of a spec fails, 2 where one could not be judged."""
    bare = Path(arguments.what).suffix == ".onnx"
    settings = settings_from(arguments, "spec/case" if arguments.output is None else "" if bare else "case")
    if arguments.output is not None:
        settings = replace(settings, output=arguments.output.absolute())
    cases = [_as_asked(case, arguments) for case in _cases(arguments.what, settings, bare=bare)]
    _prepare_output(cases, settings)
    _refuse_unknown_formats(settings)
    from qdqspec.session import Session

    with closing(Session(settings)) as session:
        if settings.mode == "plan":
            return _print_plans(cases, session)
        is_whole = _run(cases, session)
        record = session.record()
    _report(record, settings, as_json=arguments.json)
    if not is_whole:
        return IMPOSSIBLE
    failed = [r for case in record.cases for r in case.results if _is_wanting(r, settings)]
    return WANTING if failed else FINE


def _cases(what: str, settings: Settings, *, bare: bool) -> tuple[Case, ...]:
    if bare:
        return (Case(id="default", model=Path(what).absolute()),)
    if what.endswith(".py"):
        raise ConfigError(
            "specs in Python are collected by pytest only", where=what, cure=f"run: pytest {what}"
        )
    return find_cases(what, settings, Path.cwd())


def _as_asked(case: Case, arguments: argparse.Namespace) -> Case:
    """The case with what the command line says above its spec."""
    if arguments.strategy is not None and arguments.strategy not in registry.names("strategy"):
        registry.resolve("strategy", arguments.strategy)  # raises, with the nearest name
    asked = ("strategy", "preset", "trials", "minutes", "min_sqnr_db", "min_gain")
    words = {word: getattr(arguments, word) for word in asked}
    tuning = replace(case.tune, **{word: value for word, value in words.items() if value is not None})
    inputs, quantize = case.inputs, case.quantize
    if arguments.calibration is not None:
        inputs = replace(inputs, calibration=arguments.calibration.absolute())
    if arguments.scales is not None:
        inputs = replace(inputs, scales=arguments.scales.absolute())
    if arguments.shapes is not None:
        from qdqspec.spec.inline import inline_case

        inputs = replace(
            inputs, profiles=inline_case(case.model, {"shapes": arguments.shapes}).inputs.profiles
        )
    if arguments.values is not None:
        inputs = replace(inputs, values={**inputs.values, **arguments.values})
    if arguments.quant is not None:
        quantize = replace(quantize, format=arguments.quant)
    return replace(case, tune=tuning, inputs=inputs, quantize=quantize)


def _prepare_output(cases: list[Case], settings: Settings) -> None:
    for case in cases:
        folder = find_folder(settings, case)
        for name in _WRITTEN:
            refuse_input_as_output(folder / name, [case.model])
        if settings.mode != "plan":
            writable_folder(folder)
            if settings.layout != "spec/case":
                _claim_named(folder, case)


def _claim_named(folder: Path, case: Case) -> None:
    """Take a folder named with ``-o``; raise `OutputError` where it holds the results of another model."""
    other = other_owner(folder, case)
    if other is not None and any((folder / name).exists() for name in (RESULT, "trials.jsonl", "tuned.onnx")):
        raise OutputError(
            f"this folder holds the results of another model or spec ({other})",
            where=folder,
            cure="choose another folder with -o, or remove this one",
        )
    with explained("the output folder", folder, "choose another with -o"):
        note_owner(folder, case)


def _refuse_unknown_formats(settings: Settings) -> None:
    """Before a long run, and not after it."""
    if settings.report:
        from qdqspec.report.write import format_for

        for path in settings.report:
            format_for(path)


def _print_plans(cases: list[Case], session: Session) -> int:
    for case in cases:
        say(f"{case.name}: {session.plan(case)}")
    return FINE


def _run(cases: list[Case], session: Session) -> bool:
    """Judge the checks of each case, or search and measure where there are none; whether all could be judged.

    An error of a check is printed, and is in the record, as is a case that cannot run here; the others are judged all
    the same.
    """
    errors: list[str] = []
    for case in cases:
        found = session.availability(case)
        if not found.usable:
            reason = f"backend {session.settings.backend} is not usable here: {found.why}"
            session.skip(case, f"{reason}; {found.install}" if found.install else reason)
            errors.append(str(BackendUnavailableError(reason, cure=found.install or None)))
            continue
        with _watched(session):
            for check in case.checks:
                try:
                    session.judge(case, check)
                except QdqspecError as error:
                    errors.append(str(error))
            if not case.checks:
                session.evidence(case, frozenset({"latency", "parity"}))
    for text in dict.fromkeys(errors):
        complain(f"qdqspec: {text}")
    return not errors


@contextmanager
def _watched(session: Session) -> Iterator[None]:
    display: Display = Bar(file=sys.stderr) if sys.stderr.isatty() else Heartbeat(complain)
    session.watch = display.update
    try:
        yield
    finally:
        session.watch = None
        display.close()


def _report(record: RunRecord, settings: Settings, *, as_json: bool) -> None:
    from qdqspec.report.result import write_results
    from qdqspec.report.write import write_reports

    write_results(record)
    write_reports(record, settings.report)
    if as_json:
        from qdqspec.report.record import record_to_json

        say_json(record_to_json(record))
        return
    from qdqspec.report.notes import warning_lines
    from qdqspec.report.tables import summary_table

    say("\n".join([summary_table(record), *_verdict_lines(record), *warning_lines(record)]))
    for case in record.cases:
        if case.evidence.output is not None:
            say(f"Models and measurements: {case.evidence.output}")
    for path in settings.report:
        say(f"Report: {path}")


def _verdict_lines(record: RunRecord) -> list[str]:
    """What does not hold, a line each."""
    return [
        f"{'warning' if result.severity == 'warn' else result.verdict.outcome}: "
        f"{case.evidence.case.name}::{result.id} - {result.verdict.headline}"
        for case in record.cases
        for result in case.results
        if result.verdict.outcome != "pass"
    ]


def _is_wanting(result: CheckResult, settings: Settings) -> bool:
    undecided = result.verdict.outcome == "inconclusive" and "conclusive" in settings.require
    return result.severity == "error" and (result.verdict.outcome == "fail" or undecided)
