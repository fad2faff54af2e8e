"""Declares commands and their arguments, reads the values of arguments, and makes settings and inputs of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from qdqspec._core.config import Settings, add_options, find_root, flags_given, load_settings
from qdqspec.types import FixedValue, Inputs, InputShape, ShapeProfile

if TYPE_CHECKING:
    from qdqspec.accuracy import GivenFiles
    from qdqspec.graph import Model


# ---- declaration ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a command, as `argparse` declares it."""

    names: tuple[str, ...]
    settings: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Its name in the parsed arguments: the first long one, as in `argparse`."""
        long = (name for name in self.names if name.startswith("--"))
        return next(long, self.names[0]).lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class ArgumentGroup:
    """Arguments below a heading in the help; without a title, arguments that exclude each other."""

    title: str
    arguments: tuple[Argument, ...]


def argument(names: str, metavar: str | None = None, text: str = "", **settings: Any) -> Argument:
    """An argument with its ``names``, separated by a space, and its help ``text``; ``settings`` are of `argparse`."""
    words = {"metavar": metavar, "help": text.replace("%", "%%") or None}
    return Argument(tuple(names.split()), words | settings)


def switch(name: str, text: str) -> Argument:
    """An option without a value."""
    return Argument((name,), {"action": "store_true", "help": text})


@dataclass(frozen=True, slots=True)
class Verb:
    """A command: ``does`` is its description, ``options`` are the names of settings that it has options for."""

    name: str
    does: str
    example: str
    arguments: tuple[Argument | ArgumentGroup, ...]
    options: Collection[str]
    run: Callable[[argparse.Namespace], int]

    def add_to(self, verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
        """Declare the command with its arguments, ``--json``, ``--color`` and ``--help``."""
        words = [
            str(each.settings["metavar"] or "|".join(each.settings["choices"]))
            for each in self.arguments
            if isinstance(each, Argument) and not each.names[0].startswith("-")
        ]
        parser = verbs.add_parser(
            self.name,
            help=re.split(r"[.:;] ", self.does, maxsplit=1)[0].removesuffix("."),
            description=self.does,
            epilog=f"{_EXAMPLE}\n  {self.example}",
            usage=" ".join(["%(prog)s [options]", *words]),
            formatter_class=_Formatter,
            allow_abbrev=False,
        )
        parser.set_defaults(run=self.run)
        for one in (_JSON, _COLOR):
            parser.add_argument(*one.names, **one.settings)
        machine = parser.add_argument_group("where and how it runs")
        add_options(machine.add_argument, prefix="--", only=self.options)
        for each in self.arguments:
            if isinstance(each, Argument):
                parser.add_argument(*each.names, **each.settings)
                continue
            group = (
                parser.add_argument_group(each.title) if each.title else parser.add_mutually_exclusive_group()
            )
            for one in each.arguments:
                group.add_argument(*one.names, **one.settings)


def verb(
    name: str, example: str, *arguments: Argument | ArgumentGroup, options: Collection[str] = ()
) -> Callable[[Callable[[argparse.Namespace], int]], Verb]:
    """Declare a function as a command; its description is the first paragraph of the docstring."""

    def declare(run: Callable[[argparse.Namespace], int]) -> Verb:
        does = " ".join(cleandoc(run.__doc__ or "").partition("\n\n")[0].split())
        return Verb(name, does, example, arguments, options, run)

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

_SHAPE = re.compile(r"(?P<name>.+?):(?P<value>\d+(?:x\d+)*)(?:,(?=.)|$)")
_VALUE = re.compile(r"(?P<name>[^,]+):(?P<value>[^,:]+)(?:,(?=.)|$)")


def shapes(text: str) -> list[tuple[str, list[int]]]:
    """Parse ``a:1x3x224x224,b:1x16``; a name may contain a colon."""
    found = _pairs(_SHAPE, text)
    if not found:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of shapes such as images:1x3x224x224,ids:1x16")
    return [(name, [int(dim) for dim in dims.split("x")]) for name, dims in found]


def values(text: str) -> list[tuple[str, bool | int | float]]:
    """Parse ``sr:16000,training:false``: scalar inputs, fixed to a number or truth value."""
    found = [
        (name, {"true": True, "false": False}.get(value, number(value)))
        for name, value in _pairs(_VALUE, text)
    ]
    numbers = [(name, value) for name, value in found if not isinstance(value, str)]
    if not found or len(numbers) < len(found):
        raise argparse.ArgumentTypeError(f"'{text}' is no list of values such as sr:16000,training:false")
    return numbers


def _pairs(item: re.Pattern[str], text: str) -> list[tuple[str, str]]:
    """Names and values of a list with commas; none if ``item`` does not match all of it."""
    matches = list(item.finditer(text))
    if "".join(match[0] for match in matches) != text:
        return []
    return [(match["name"], match["value"]) for match in matches]


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


def output(metavar: str, text: str = "", *, required: bool = True) -> Argument:
    """``-o``."""
    return argument("-o --output", metavar, text, type=Path, required=required)


def shapes_option(name: str, text: str) -> Argument:
    """An option with shapes of inputs."""
    return argument(name, "NAME:1x3x224x224", text, type=shapes, action=Joined)


def values_option(of: str = "the model") -> Argument:
    """``--values`` with the syntax of `tune`."""
    text = f"Inputs of {of} fixed to a number, true or false, as `tune --values` fixes them; several with commas."
    return argument("--values", "NAME:16000", text, type=values, action=Joined)


def input_options(
    of: str = "the model", *, shapes_of: str = "inputs with dynamic dimensions", data: str = ""
) -> tuple[Argument, ...]:
    """``--shapes``, ``--values``, and ``--data`` (or ``--evaluation``) if there is a help for it."""
    forms = f"{data} The forms are those of `tune --evaluation`."
    return (
        shapes_option("--shapes", f"Shapes of {shapes_of}."),
        *([argument("--data --evaluation", "PATH", forms, type=data_given)] if data else []),
        values_option(of),
    )


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
    from qdqspec.accuracy import GivenFiles

    return GivenFiles()
