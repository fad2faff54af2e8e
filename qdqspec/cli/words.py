"""Shared parts of all commands: declaration, common options and messages, and their settings."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeAlias, TypeVar, cast

from qdqspec.config import Settings, add_options, find_root, flags_given, load_settings
from qdqspec.errors import OutputError
from qdqspec.report.terminal import colored, fitted, wants_color

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no other name

T = TypeVar("T")

FINE, WANTING, IMPOSSIBLE = 0, 1, 2

if TYPE_CHECKING:
    from qdqspec.graph.model import Model
    from qdqspec.session.given_data import GivenFiles
    from qdqspec.types import FixedValue, Inputs


def add_verb(
    verbs: Verbs,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    does: str,
    example: str,
    options: Iterable[str] = (),
    rare: Collection[str] = (),
) -> argparse.ArgumentParser:
    """Declare a command with ``--json``, an example, and the ``options`` it takes from the common table.

    Only ``--help-all`` shows the ``rare`` ones, by ``dest``, and those of the common table if there are many.
    """
    parser = verbs.add_parser(
        name,
        help=re.split(r"[.:;] ", does, maxsplit=1)[0].removesuffix("."),
        description=does,
        epilog=f"{_EXAMPLE}\n  {example}",
        formatter_class=_Formatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="Write JSON to standard output: all figures, the notes and the text, or the error.",
    )
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="Colour; auto (the default): on a terminal, unless NO_COLOR is set.",
    )
    machine = parser.add_argument_group("where and how it runs")
    add_options(machine.add_argument, prefix="--", only=options)
    common = [action.dest for action in machine._group_actions if action.dest not in _COMMON]  # noqa: SLF001 - no other list
    hidden = {*rare, *(common if len(common) >= _MANY else ())}
    parser.add_argument("-h", "--help", action=_Help, hidden=hidden, help="Show this help and exit.")
    everything = "Show all options and exit." if hidden else argparse.SUPPRESS
    parser.add_argument("--help-all", action=_Help, hidden=(), help=everything)
    parser.set_defaults(run=run)
    return parser


_EXAMPLE = "example:"
_MANY = 6  # options that are shown by --help-all only, if a verb has so many
_COMMON = ("qdq_backend", "qdq_mode", "qdq_threads", "qdq_report")


class _Formatter(argparse.HelpFormatter):
    """Wraps descriptions, but no examples: these are lines to copy."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)


class _Help(argparse.Action):
    """Prints the help of a verb without the ``hidden`` options."""

    def __init__(self, hidden: Collection[str], **settings: Any) -> None:
        super().__init__(**{**settings, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS, "nargs": 0})
        self._hidden = hidden

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action in parser._actions:  # noqa: SLF001 - no other list
            if action.dest in self._hidden:
                action.help = argparse.SUPPRESS
        if self._hidden:
            words = [str(action.metavar) for action in parser._get_positional_actions()]  # noqa: SLF001 - no other list
            parser.usage = " ".join([parser.prog, "[options]", *words])
        parser.print_help()
        parser.exit()


def settings_from(
    arguments: argparse.Namespace, layout: Literal["spec/case", "case", ""] = "spec/case"
) -> Settings:
    """The settings of a command; its options override the environment and ``pyproject.toml``."""
    return load_settings(
        find_root(Path.cwd()), flags=flags_given(vars(arguments)), prefix="--", layout=layout
    )


COLOR: ContextVar[str] = ContextVar("color", default="auto")  # the value of --color of the running command
AS_JSON: ContextVar[bool] = ContextVar("as_json", default=False)  # whether the running command has --json
NOTED: ContextVar[list[str]] = ContextVar("noted")  # the notes of the running command so far


def say(text: str) -> None:
    """Write text to standard output: on a terminal in colour and within its width."""
    _write(text, sys.stdout)


def say_json(value: object) -> None:
    """Write a value as JSON to standard output."""
    sys.stdout.write(f"{json.dumps(value, indent=2)}\n")


def say_error(error: str, *, what: str, where: str | None, cure: str | None) -> None:
    """Write an error to standard output if the command has ``--json``: what, where, and what to do."""
    if AS_JSON.get():
        say_json({"schema_version": 1, "error": error, "what": what, "where": where, "cure": cure})


def answer(
    arguments: argparse.Namespace, data: Mapping[str, Any], text: str, *, notes: Iterable[str] = ()
) -> None:
    """Write the result of a verb: its ``notes`` and ``text``, or JSON if that was asked for.

    JSON has the ``data``, the ``text`` as well, and all notes of the command. Each figure and name of the text is also
    in the data.
    """
    if arguments.json:
        texts = [*data.get("notes", ()), *notes, *NOTED.get()]
        say_json({"schema_version": 1, **data, "notes": texts, "text": text})
        return
    for note in notes:
        say(f"note: {note}")
    if text:
        say(text)


def conclude(
    arguments: argparse.Namespace,
    summary: str,
    notes: Iterable[str],
    found: Mapping[str, Any],
    output: Path | None = None,
) -> int:
    """Report that ``output`` was written, by default that of the arguments; ``found`` is for JSON."""
    path = output or arguments.output
    answer(arguments, {"output": str(path), **found}, f"{path}: {summary}", notes=notes)
    return FINE


def note(text: str) -> None:
    """Write a note to standard error, and keep it for the JSON of the command."""
    complain(f"note: {text}")
    NOTED.get().append(text)


def complain(text: str) -> None:
    """Write text to standard error: on a terminal in colour and within its width."""
    _write(text, sys.stderr)
    sys.stderr.flush()


def _write(text: str, stream: TextIO) -> None:
    if stream.isatty():
        text = fitted(text, shutil.get_terminal_size().columns)
    if wants_color(COLOR.get(), os.environ, is_terminal=stream.isatty()):
        text = colored(text)
    stream.write(f"{text}\n")


def end_on_sigterm() -> None:
    """End on SIGTERM, which service managers and batch systems send, as on Ctrl-C: in order, with all processes."""
    signal.signal(signal.SIGTERM, _interrupt)


# Of `logging`, before and after a fork; the last two since Python 3.13.
_FORK_HOOKS = ("_acquireLock", "_releaseLock", "_prepareFork", "_afterFork")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise `KeyboardInterrupt`; a moment later in functions called at a fork, where Python ignores exceptions."""
    while frame is not None:
        if frame.f_code.co_name in _FORK_HOOKS:
            threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt


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


_TWICE = "'{name}' is given twice"
_SHAPE = re.compile(r"(?P<name>.+?):(?P<dims>\d+(?:x\d+)*)(?:,(?=.)|$)")


def shapes(text: str) -> dict[str, list[int]]:
    """Parse ``a:1x3x224x224,b:1x16``; a name may contain a colon."""
    found = list(_SHAPE.finditer(text))
    if "".join(match[0] for match in found) != text or not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of shapes such as images:1x3x224x224,ids:1x16")
    return _each_once((match["name"], [int(dim) for dim in match["dims"].split("x")]) for match in found)


def _each_once(pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            raise argparse.ArgumentTypeError(_TWICE.format(name=name))
        found[name] = value
    return found


class Joined(argparse.Action):
    """An option whose value is a mapping; a repeated option adds to it."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        _option: str | None = None,
    ) -> None:
        """Add the mapping to the earlier ones; a name given twice is an error."""
        before, new = getattr(namespace, self.dest) or {}, cast("Mapping[str, object]", values)
        if twice := sorted(before.keys() & new.keys()):
            raise argparse.ArgumentError(self, _TWICE.format(name=twice[0]))
        setattr(namespace, self.dest, {**before, **new})


_VALUE = re.compile(r"(?P<name>[^,]+):(?P<value>[^,:]+)(?:,(?=.)|$)")


def values(text: str) -> dict[str, bool | int | float]:
    """Parse ``sr:16000,training:false``: scalar inputs, fixed to a number or truth value."""
    found = list(_VALUE.finditer(text))
    try:
        if "".join(match[0] for match in found) == text and found:
            return _each_once((match["name"], _scalar(match["value"])) for match in found)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"'{text}' is no list of values such as sr:16000,training:false")


def _scalar(text: str) -> bool | int | float:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)


def number(text: str) -> int | float | str:
    """A number if the text is one; other text, such as ``1%``, ``90s`` or ``none``, unchanged."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text, re.ASCII) else value


def data_given(text: str) -> object:
    """A path, or a table as in a spec: ``{images: 'photos/*.jpg', size: 224}``."""
    if not text.lstrip().startswith("{"):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no table as in a spec: {error}") from None


def add_inputs(
    parser: argparse.ArgumentParser,
    of: str = "the model",
    *,
    shapes_of: str = "inputs with dynamic dimensions",
    data: str = "",
) -> None:
    """Declare ``--shapes``, ``--values``, and ``--data`` if there is a help for it."""
    parser.add_argument(
        "--shapes", type=shapes, action=Joined, metavar="NAME:1x3x224x224", help=f"Shapes of {shapes_of}."
    )
    if data:
        parser.add_argument(
            "--data",
            type=data_given,
            metavar="PATH",
            help=f"{data} The forms are those of `tune --evaluation`.",
        )
    add_values(parser, of)


def add_values(parser: argparse.ArgumentParser, of: str = "the model") -> None:
    """Declare ``--values`` with the syntax of `tune`."""
    parser.add_argument(
        "--values",
        type=values,
        action=Joined,
        metavar="NAME:16000",
        help=f"Inputs of {of} fixed to a number, true or false, as `tune --values` fixes them; several with commas.",
    )


def model_given(path: Path, fixed: Mapping[str, FixedValue] | None = None) -> Model:
    """Load the model of a file as `tune` does: local functions inlined, inputs fixed to values."""
    from qdqspec.graph.given import given_model

    return given_model(path.absolute(), fixed or {})


def values_left(
    path: Path, values: Mapping[str, FixedValue] | None
) -> tuple[Mapping[str, FixedValue], tuple[str, ...]]:
    """The ``values`` of inputs that a model made by an earlier run still has, and notes on the others.

    A model that was tuned with an input fixed has that input no more.
    """
    if not values:
        return {}, ()
    inputs = model_given(path).inputs
    left = {name: value for name, value in values.items() if name in inputs}
    missing = (name for name in values if name not in left)
    return left, tuple(
        f"{path.name} has no input '{name}': it is assumed to have been fixed when the model was made"
        for name in missing
    )


def inputs_given(
    inputs: Inputs,
    *,
    shapes: dict[str, list[int]] | None,
    data: object = None,
    values: Mapping[str, FixedValue] | None = None,
) -> Inputs:
    """The inputs of a case with those of the command line: ``--shapes``, ``--values``, and ``--data`` to compare on.

    Raises `SpecError` for data that is no table as in a spec.
    """
    from qdqspec.spec.inline import data_source
    from qdqspec.types import InputShape, ShapeProfile

    if shapes is not None:
        fixed = {name: InputShape(min=(*dims,), opt=(*dims,), max=(*dims,)) for name, dims in shapes.items()}
        inputs = replace(inputs, profiles=(ShapeProfile(shapes=fixed),))
    if values is not None:
        inputs = replace(inputs, values={**inputs.values, **values})
    if data is None:
        return inputs
    return _given_files().loaded_inputs(replace(inputs, evaluation=data_source(data, "--data")), {})


@cache
def _given_files() -> GivenFiles:
    """Files of data loaders, until the command ends."""
    from qdqspec.session.given_data import GivenFiles

    return GivenFiles()
