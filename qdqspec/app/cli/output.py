"""Output of the commands: results, notes and errors as text or JSON, exit codes, and the files that ``-o`` names."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from qdqspec.app.report.terminal import color_words, wants_color
from qdqspec.errors import OutputError

FINE, WANTING, IMPOSSIBLE = 0, 1, 2

COLOR: ContextVar[str] = ContextVar("color", default="auto")  # the value of --color of the running command
AS_JSON: ContextVar[bool] = ContextVar("as_json", default=False)  # whether the running command has --json
NOTED: ContextVar[list[str]] = ContextVar("noted")  # the notes of the running command so far


def say(text: str) -> None:
    """Write text to standard output, on a terminal in colour."""
    _write(text, sys.stdout)


def say_json(value: object) -> None:
    """Write a value as JSON to standard output."""
    _write_line(json.dumps(value, indent=2), sys.stdout)


def say_error(error: str, *, what: str, where: str | None, cure: str | None) -> None:
    """Write an error to standard output if the command has ``--json``: what, where, and what to do."""
    if AS_JSON.get():
        say_json({"schema_version": 1, "error": error, "what": what, "where": where, "cure": cure})


def answer(
    arguments: argparse.Namespace,
    data: Mapping[str, Any],
    text: str,
    *,
    notes: Iterable[str] = (),
    code: int = FINE,
) -> int:
    """Write the result of a verb, its ``notes`` and ``text``, or JSON if that was asked for; returns the exit code.

    JSON has the ``data``, the ``text`` as well, and all notes of the command. Each figure and name of the text is also
    in the data.
    """
    if arguments.json:
        texts = [*data.get("notes", ()), *notes, *NOTED.get()]
        say_json({"schema_version": 1, **data, "notes": texts, "text": text})
    else:
        for one in notes:
            say(f"note: {one}")
        if text:
            say(text)
    return code


def conclude(
    arguments: argparse.Namespace,
    summary: str,
    notes: Iterable[str],
    found: Mapping[str, Any],
    output: Path | None = None,
) -> int:
    """Report that ``output`` was written, by default the output that the arguments name; ``found`` is for JSON."""
    path = output or arguments.output
    return answer(arguments, {"output": str(path), **found}, f"{path}: {summary}", notes=notes)


def note(text: str) -> None:
    """Write a note to standard error, and keep it for the JSON of the command."""
    complain(f"note: {text}")
    NOTED.get().append(text)


def complain(text: str) -> None:
    """Write text to standard error, on a terminal in colour."""
    _write(text, sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    if wants_color(COLOR.get(), os.environ, is_terminal=stream.isatty()):
        text = color_words(text)
    _write_line(text, stream)


def _write_line(text: str, stream: TextIO) -> None:
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except BrokenPipeError:  # the reader, such as `head`, has ended: the exit code is that of the verb
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def end_on_sigterm() -> None:
    """End on SIGTERM, which service managers and batch systems send, as on Ctrl-C: in order, with all processes.

    A shell may have started the command with SIGINT ignored.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def refuse_input_as_output(output: Path, inputs: Iterable[Path]) -> None:
    """Raise `OutputError` if ``-o`` names an input file: files of the user are never overwritten."""
    for path in inputs:
        if output.resolve() == path.resolve():
            raise OutputError(
                "this file is an input, and inputs are not written to",
                where=output,
                cure="name another file with -o",
            )


def writable_folder(path: Path) -> Path:
    """Create the folder and check that it is writable, before hours of work and not after them."""
    probe = path / ".qdqspec-probe"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"the output folder cannot be written to: {error.strerror}",
            where=path,
            cure="choose another with -o",
        ) from None
    return path
