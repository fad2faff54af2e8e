"""The commands of ``qdqspec``. Exit code 0: success; 1: a check or comparison failed; 2: the command could not be run.

Only the standard library is imported with this module; each command imports its modules when it runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from qdqspec import __version__
from qdqspec._core.registry import did_you_mean
from qdqspec.app.cli import compare, explain, init, machine, models, specs, tune, verify
from qdqspec.app.cli.command import AS_JSON, COLOR, FINE, IMPOSSIBLE, INTERRUPTED, NOTED, complain, say_error
from qdqspec.errors import QdqspecError

VERBS = (  # in the order of the help
    *(init.init, tune.tune),
    *(models.inspect, models.apply, models.strip, models.import_model, models.diff, models.fold, models.lint),
    *(specs.list_cases, specs.write_schema, compare.compare, compare.upgrade_check, explain.explain),
    *(verify.verify, verify.reduce, specs.baseline, machine.cache),
    *(machine.cluster, machine.worker, machine.doctor, machine.config),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Errors of input and environment are one message on stderr.

    With ``--json`` they are also an object on standard output.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    AS_JSON.set("--json" in words)
    if "_ARGCOMPLETE" in os.environ:
        with suppress(ImportError):  # without the extra `completion`
            import argcomplete

            argcomplete.autocomplete(parsers()[0])  # answers the shell, and exits
    if not words:
        parsers()[0].print_help()
        return FINE
    try:
        arguments = _parsed(words)
        NOTED.set([])
        COLOR.set(getattr(arguments, "color", "auto"))
        code: int = arguments.run(arguments)
    except QdqspecError as error:
        complain(f"qdqspec: {error}")
        say_error(str(error), what=error.what, where=error.where, cure=error.cure)
        return IMPOSSIBLE
    except KeyboardInterrupt:
        start = "\n" if sys.stderr.isatty() else ""  # the terminal has written ^C
        # with a cluster the measurements are on the worker
        is_remote = any(word.partition("=")[0] == "--cluster" for word in words)
        is_kept = words[0] == "tune" and not is_remote
        kept = (
            f"; the measurements are kept. Resume with: {shlex.join(('qdqspec', *words))}" if is_kept else ""
        )
        complain(f"{start}Interrupted{kept}")
        return INTERRUPTED
    return code


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; options of ModelOpt's autotune are errors that name the equivalent option."""
    parser, verbs = parsers()
    known = [*verbs, *parser._option_string_actions]  # noqa: SLF001 - argparse has no other list of its options
    if words[0] not in known:
        what = "option" if words[0].startswith("-") else "verb"
        parser.error(f"unknown {what} '{words[0]}'{did_you_mean(words[0], known)}")
    is_tune = words[:1] == ["tune"]
    if is_tune:
        tune.refuse_mode(words[1:])
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        if is_tune:
            tune.refuse_words(unknown)
        verb = verbs[words[0]]
        # Values of an unknown option may be read as other arguments, so that only options are named, if any.
        named = [word for word in unknown if word.startswith("-")] or unknown
        own = list(verb._option_string_actions)  # noqa: SLF001
        options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        near = next(filter(None, (did_you_mean(option, own) for option in options)), "")
        if "--data" in own and "--calibration" in options:  # its name elsewhere
            near = " (did you mean '--data'?)"
        if {"--shapes", "--values"}.intersection(words) and ":" in named[0]:
            near = " (several are separated by commas: --shapes x:1x8,y:2x3)"
        verb.error(f"unrecognized arguments: {shlex.join(named)}{near}")
    return arguments


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one message and names the command for help; it does not list all options."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            near = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"'{value}' is not one of {', '.join(known)}{near}")

    def error(self, message: str) -> NoReturn:
        cure = f"{self.prog} --help"
        complain(f"{self.prog}: error: {message}\n  help: {cure}")
        say_error(f"{self.prog}: error: {message}", what=message, where=None, cure=cure)
        self.exit(IMPOSSIBLE)


def parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the command, and the parser of each verb."""
    parser: argparse.ArgumentParser = _Parser(
        prog="qdqspec",
        description="Search for, verify and gate Q/DQ placements in ONNX models. Tests run with pytest: pytest specs",
        epilog="qdqspec VERB --help shows an example of each verb.",
    )
    parser.add_argument("--version", action="version", version=f"qdqspec {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", title="verbs", required=True)
    for add in VERBS:
        add(verbs)
    return parser, verbs.choices
