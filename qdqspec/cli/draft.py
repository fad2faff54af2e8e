"""The spec that ``init`` writes: the model's inputs, the backend's capabilities, and all other keys as comments.

Text only; the caller has inspected the model.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qdqspec.config.hooks import declaration_of, declares
from qdqspec.config.settings import DEFAULT_BACKEND
from qdqspec.units import plain

_DEFAULT_LINT = declaration_of(DEFAULT_BACKEND).lint_targets[0]
_SAFE = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})  # not text for some YAML
_TAIL = """\
# matrix: {{quant: [{formats}]}}   # a case for each; formats that operators of this model can have
# patterns: {{deny: [{denied}], nodes: {{exclude: [{excluded}]}}}}   # operators and nodes that stay float
# quantize: {{calibration: entropy, weights: per-channel}}

tune: {{preset: default, minutes: 5, min_sqnr_db: 20}}   # no placement below 20 dB wins

checks:
  - {{kind: speedup, min: 1.1}}             # reference time over tuned time; fails if the model gains less
  - {{kind: parity, min_sqnr_db: 20}}       # of its outputs on all data against the float model's
{accuracy}  # - {{kind: latency, max_ms: {{{target}: 10}}}}
  # - {{kind: regression, max: 5%}}         # against a committed baseline: pytest --qdq-update=new
  # - {{kind: lint, target: [{lint}]}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDraft:
    """An input of a model. ``shape`` is the proposal of the spec, ``open_dims`` the dimensions that are not fixed.

    ``from_data`` is true if data fixed those dimensions.
    """

    name: str
    kind: str
    shape: tuple[int, ...] | None
    open_dims: tuple[int, ...] = ()
    from_data: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataDraft:
    """Data that fits the model, as written in the spec. ``metric`` is a built-in one that its labels fit."""

    calibration: str = ""
    evaluation: str = ""
    labelled: bool = False
    metric: str = ""
    guessed: str = ""  # sides of images that the model leaves open, as `height 224 and width 224`

    @property
    def is_shared(self) -> bool:
        """Whether one data set is used for both."""
        return bool(self.calibration) and self.calibration == self.evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The contents of the spec. ``facts`` and ``cautions`` are sentences; ``target`` is a backend and variant.

    ``denied`` is an operator of the model, ``excluded`` a name of a node: both are examples in comments.
    """

    model: str
    version: str
    facts: Sequence[str]
    cautions: Sequence[str]
    inputs: Sequence[InputDraft]
    formats: Sequence[str]
    target: str
    data: DataDraft = DataDraft()
    denied: str = "Softmax"
    excluded: str = "/head/*"

    def text(self) -> str:
        """The text of the file."""
        head = [f"# Written by qdqspec init {self.version}. Editors complete it from: qdqspec schema", "#"]
        for sentence in (*self.facts, *(f"Note: {caution}" for caution in self.cautions)):
            head += textwrap.wrap(plain(sentence), 110, initial_indent="# ", subsequent_indent="#   ")
        head.append("# Each line below that is a comment can be used alone: remove its '# '.")
        body = ["qdqspec: 1", f"model: {quoted(self.model)}", "", *_inputs(self.inputs, self.data), ""]
        lint = self.target if declares("lint_targets", self.target) else _DEFAULT_LINT
        metric = self.data.metric
        accuracy = f"  # - {{kind: accuracy, metric: {metric}, max_drop: 1%}}\n" if metric else ""
        tail = _TAIL.format(
            formats=", ".join(self.formats),
            target=self.target,
            lint=lint,
            accuracy=accuracy,
            denied=self.denied,
            excluded=json.dumps(self.excluded, ensure_ascii=False),
        )
        return "\n".join([*head, *body]) + "\n" + tail


def quoted(text: str) -> str:
    """A text as YAML reads it back: unquoted if that is safe, else in double quotes."""
    if _SAFE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    written = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in written)


def relative_text(path: Path, base: Path) -> str:
    """A path relative to a folder, with slashes, as a spec there names it."""
    return Path(os.path.relpath(path.absolute(), base)).as_posix()


def _inputs(inputs: Sequence[InputDraft], data: DataDraft) -> Iterator[str]:
    shaped = [one for one in inputs if one.shape and all(one.shape)]
    scalars = [one for one in inputs if one.shape == () and one.kind not in _FLOATS]
    yield "inputs:"
    if shaped:
        yield "  shapes:                                 # at which the model is timed"
        yield from (f"    {_shape(one)}" for one in shaped)
        yield from (
            f"    # {quoted(one.name)}: [1]  # {one.kind}, of unknown rank" for one in _unknown(inputs)
        )
    else:
        yield "  values: {}                              # inputs fixed to a value, by name"
    if scalars and shaped:
        fixed = ", ".join(f"{quoted(one.name)}: {'true' if one.kind == 'bool' else 1}" for one in scalars)
        yield f"  # values: {{{fixed}}}   # fixed in the tuned model; write the value that is used"
    about = "one array per input, first axis = samples" + (
        "" if data.calibration else "; without it inputs are random"
    )
    if data.calibration.startswith("{images"):
        about = "images, and their transform"
        if data.guessed:
            about += f"; guessed, since the model leaves it open: {data.guessed}"
    yield f"  {_line('calibration', data.calibration)}  # {about}"
    more = "" if data.labelled else "; with `labels` also for {kind: accuracy, max_drop: 1%}"
    judged = "the same data as calibration: name other samples" if data.is_shared else "the same to judge by"
    yield f"  {_line('evaluation', data.evaluation)}  # {judged}{more}"


_FLOATS = frozenset({"float", "double", "float16", "bfloat16"})


def _unknown(inputs: Sequence[InputDraft]) -> list[InputDraft]:
    return [one for one in inputs if one.shape is None and one.kind != "no tensor"]


def _line(key: str, found: str) -> str:
    """A line for data that was found, else a comment with an example."""
    return f"{key}: {found}" if found else f"# {key}: data.npz".ljust(34)


def _shape(one: InputDraft) -> str:
    assert one.shape is not None
    shape = "[" + ", ".join(map(str, one.shape)) + "]"
    origin = "fixed"
    if one.open_dims:
        which = ", ".join(map(str, one.open_dims))
        single = len(one.open_dims) == 1
        source = "taken from the data" if one.from_data else "a guess" if single else "guesses"
        origin = f"dimension {which} is dynamic, and this is {source}"
        if not single:
            origin = f"dimensions {which} are dynamic, and these are {source}"
    return f"{quoted(one.name)}: {shape}  # {one.kind}, {origin}"


def counted(counts: Mapping[str, int], most: int = 12) -> str:
    """Counts of operators, the most frequent first: ``Conv 26, MaxPool 3``."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(ranked) - most} more" if len(ranked) > most else ""
    return ", ".join(f"{name} {count}" for name, count in ranked[:most]) + more
