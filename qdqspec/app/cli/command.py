"""What all commands share: their declaration, values of arguments, settings and inputs, and output with exit codes."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias, cast

from qdqspec._core.config import Settings, add_options, find_root, flags_given, load_settings
from qdqspec.app.report.terminal import color_words, wants_color
from qdqspec.errors import ConfigError, OutputError
from qdqspec.types import FixedValue, Inputs, InputShape, ShapeProfile

if TYPE_CHECKING:
    from qdqspec.app.given_data import GivenFiles
    from qdqspec.graph import Model

FINE, WANTING, IMPOSSIBLE = 0, 1, 2
INTERRUPTED = 128 + signal.SIGINT  # the convention of shells

COLOR: ContextVar[str] = ContextVar("color", default="auto")  # the value of --color of the running command
AS_JSON: ContextVar[bool] = ContextVar("as_json", default=False)  # whether the running command has --json
NOTED: ContextVar[list[str]] = ContextVar("noted")  # the notes of the running command so far

# ---- declaration ---------------------------------------------------------------------------------

# Adds an argument, or a group of them (`None`), to a parser or a group of it: these have no public type in common.
Declared: TypeAlias = Callable[[Any], argparse.Action | None]
Verb: TypeAlias = Callable[[Any], None]  # adds a command to the subparsers


def argument(names: str, metavar: str | None = None, text: str = "", **settings: Any) -> Declared:
    """An argument with its ``names``, separated by a space, and its help ``text``; ``settings`` are of `argparse`."""
    words = {"metavar": metavar, "help": text.replace("%", "%%") or None} | settings
    return lambda parser: parser.add_argument(*names.split(), **words)


def switch(name: str, text: str) -> Declared:
    """An option without a value."""
    return lambda parser: parser.add_argument(name, action="store_true", help=text)


def group(title: str, *arguments: Declared) -> Declared:
    """Arguments below a heading in the help; without a title, arguments that exclude each other."""

    def add(parser: Any) -> None:
        part = parser.add_argument_group(title) if title else parser.add_mutually_exclusive_group()
        for each in arguments:
            each(part)

    return add


def verb(
    name: str, example: str, *arguments: Declared, options: Collection[str] = ()
) -> Callable[[Callable[[argparse.Namespace], int]], Verb]:
    """Make a function a command with ``--json``, ``--color``, its ``arguments``, and ``options`` that are settings.

    Its description is the first paragraph of the docstring.
    """

    def declare(run: Callable[[argparse.Namespace], int]) -> Verb:
        does = " ".join(cleandoc(run.__doc__ or "").partition("\n\n")[0].split())

        def add(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
            parser = verbs.add_parser(
                name,
                help=re.split(r"[.:;] ", does, maxsplit=1)[0].removesuffix("."),
                description=does,
                epilog=f"{_EXAMPLE}\n  {example}",
                formatter_class=_Formatter,
                allow_abbrev=False,
            )
            parser.set_defaults(run=run)
            for each in (_JSON, _COLOR):
                each(parser)
            machine = parser.add_argument_group("where and how it runs")
            add_options(machine.add_argument, prefix="--", only=options)
            own = [each(parser) for each in arguments]
            named = [one for one in own if one is not None and not one.option_strings]
            words = (str(one.metavar or "|".join(one.choices or ())) for one in named)
            parser.usage = " ".join(["%(prog)s [options]", *words])

        return add

    return declare


_EXAMPLE = "example:"
_JSON = switch("--json", "Write JSON to standard output: all figures, the notes and the text, or the error.")
_COLOR = argument(
    "--color",
    text="Colour; auto (the default): on a terminal, unless NO_COLOR is set.",
    choices=("auto", "always", "never"),
    default="auto",
)


class _Formatter(argparse.HelpFormatter):
    """Wraps descriptions, but no examples: these are lines to copy."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)


# ---- values --------------------------------------------------------------------------------------


def shapes(text: str) -> list[tuple[str, list[int]]]:
    """Parse ``a:1x3x224x224,b:1x16``; a name may contain colons and commas."""
    found = re.findall(r"(.+?):([0-9]+(?:x[0-9]+)*)(?:,|$)", text)
    if not found or ",".join(map(":".join, found)) != text:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of shapes such as images:1x3x224x224,ids:1x16")
    return [(name, [int(dim) for dim in dims.split("x")]) for name, dims in found]


def values(text: str) -> list[tuple[str, bool | int | float]]:
    """Parse ``sr:16000,training:false``: scalar inputs, fixed to a number or truth value."""
    found = [(name, {"true": True, "false": False}.get(value, number(value))) for name, value in _pairs(text)]
    numbers = [(name, value) for name, value in found if not isinstance(value, str)]
    if len(numbers) < len(found):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of values such as sr:16000,training:false")
    return numbers


def _pairs(text: str) -> list[tuple[str, str]]:
    """Names and values of a list with commas; without a name the value is empty, which is none."""
    parts = [item.rpartition(":") for item in text.split(",")]
    return [(name, value if name else "") for name, _, value in parts]


class Joined(argparse.Action):
    """An option whose value is a mapping, given as pairs; a repeated option adds to it."""

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        _option: str | None = None,
    ) -> None:
        """Add the pairs; a name given twice is an error."""
        found = dict(getattr(namespace, self.dest) or {})
        for name, value in cast("Iterable[tuple[str, object]]", values):
            if name in found:
                raise argparse.ArgumentError(self, f"'{name}' is given twice")
            found[name] = value
        setattr(namespace, self.dest, found)


def number(text: str) -> int | float | str:
    """A number if the text is one; other text, such as ``1%``, ``90s`` or ``none``, unchanged."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else value


def data_given(text: str) -> object:
    """A path, or a table as in a spec: ``{images: 'photos/*.jpg', size: 224}``."""
    if not text.lstrip().startswith("{"):
        return text
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is no table as in a spec: {error}") from None


# ---- arguments of several commands ---------------------------------------------------------------

MODEL = argument("model", "MODEL", type=Path)


def output(metavar: str, text: str = "", *, required: bool = True) -> Declared:
    """``-o``."""
    return argument("-o --output", metavar, text, type=Path, required=required)


def shapes_option(name: str, text: str) -> Declared:
    """An option with shapes of inputs."""
    return argument(name, "NAME:1x3x224x224", text, type=shapes, action=Joined)


def values_option(of: str = "the model") -> Declared:
    """``--values`` with the syntax of `tune`."""
    text = f"Inputs of {of} fixed to a number, true or false, as `tune --values` fixes them; several with commas."
    return argument("--values", "NAME:16000", text, type=values, action=Joined)


def input_options(
    of: str = "the model", *, shapes_of: str = "inputs with dynamic dimensions", data: str = ""
) -> tuple[Declared, ...]:
    """``--shapes``, ``--values``, and ``--data`` (or ``--evaluation``) if there is a help for it."""
    forms = f"{data} The forms are those of `tune --evaluation`."
    return (
        shapes_option("--shapes", f"Shapes of {shapes_of}."),
        *([argument("--data --evaluation", "PATH", forms, type=data_given)] if data else []),
        values_option(of),
    )


def at_least_one(text: str) -> int:
    """A number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def refuse_options(arguments: argparse.Namespace, names: str, of: str) -> None:
    """Raise `ConfigError` if one of the options ``names``, separated by a space, is given: it has no effect here.

    ``of`` is what it is for.
    """
    for name in names.split():
        if getattr(arguments, name.replace("-", "_")) is not None:
            raise ConfigError(f"--{name} is for {of}", cure="leave it out")


# ---- settings and inputs -------------------------------------------------------------------------


def settings_from(arguments: argparse.Namespace) -> Settings:
    """The settings of a command; its options override the environment and ``pyproject.toml``."""
    return load_settings(find_root(Path.cwd()), flags=flags_given(vars(arguments)), prefix="--")


def model_given(path: Path, fixed: Mapping[str, FixedValue] | None = None) -> Model:
    """Load the model of a file as `tune` does: local functions inlined, inputs fixed to values."""
    from qdqspec.graph import given_model

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
    inputs: Inputs, arguments: argparse.Namespace, values: Mapping[str, FixedValue] | None = None
) -> Inputs:
    """The inputs of a case with ``--shapes`` and ``--data``, to compare on, of the command line, and with ``values``.

    Raises `SpecError` for data that is no table as in a spec.
    """
    from qdqspec.spec import data_source

    if arguments.shapes is not None:
        fixed = {name: InputShape.of((*dims,)) for name, dims in arguments.shapes.items()}
        inputs = replace(inputs, profiles=(ShapeProfile(shapes=fixed),))
    if values is not None:
        inputs = replace(inputs, values={**inputs.values, **values})
    if arguments.data is None:
        return inputs
    return _given_files().loaded_inputs(replace(inputs, evaluation=data_source(arguments.data, "--data")), {})


@cache
def _given_files() -> GivenFiles:
    """Files of data loaders, until the command ends."""
    from qdqspec.app.given_data import GivenFiles

    return GivenFiles()


# ---- output --------------------------------------------------------------------------------------


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
