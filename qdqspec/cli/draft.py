"""The spec that ``init`` writes: the model's inputs, the backend's capabilities, and all other keys as comments.

Text only; the caller has inspected the model.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from qdqspec.config.hooks import declaration_of, declares
from qdqspec.config.settings import DEFAULT_BACKEND
from qdqspec.units import plain

_DEFAULT_LINT = declaration_of(DEFAULT_BACKEND).lint_targets[0]
_SAFE = re.compile(r"[A-Za-z][\w./-]*", re.ASCII)
_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "null", "y", "n"})  # not text for some YAML
_TAIL = """\
# matrix: {{quant: [{formats}]}}   # a case for each; this backend's formats
# patterns:
#   deny: [Softmax]                       # operators or patterns that stay float, such as "Conv > Relu"
#   nodes: {{exclude: ["/head/*"]}}         # the same by name
# quantize: {{calibration: entropy, weights: per-channel}}

tune: {{preset: default, minutes: 5, min_sqnr_db: 20}}   # no placement below 20 dB wins

checks:
  - {{kind: speedup, min: 1.0}}             # never slower than the float model; raise it once you know what it gains
  - {{kind: parity, min_sqnr_db: 20}}       # of its outputs against the float model's
  # - {{kind: accuracy, metric: top1, max_drop: 1%}}   # needs labels in inputs.evaluation
  # - {{kind: latency, max_ms: {{{target}: 10}}}}
  # - {{kind: regression, max: 5%}}         # against a committed baseline: pytest --qdq-update=new
  # - {{kind: lint, target: [{lint}]}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputDraft:
    """An input of a model. ``shape`` is what the spec proposes, ``open_dims`` the dimensions that are not fixed."""

    name: str
    kind: str
    shape: tuple[int, ...] | None
    open_dims: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The contents of the spec. ``facts`` and ``cautions`` are sentences; ``target`` is a backend and variant."""

    model: str
    version: str
    facts: Sequence[str]
    cautions: Sequence[str]
    inputs: Sequence[InputDraft]
    formats: Sequence[str]
    target: str

    def text(self) -> str:
        """The text of the file."""
        head = [f"# Written by qdqspec init {self.version}. Editors complete it from: qdqspec schema", "#"]
        for sentence in (*self.facts, *(f"Note: {caution}" for caution in self.cautions)):
            head += textwrap.wrap(plain(sentence), 110, initial_indent="# ", subsequent_indent="#   ")
        body = ["qdqspec: 1", f"model: {quoted(self.model)}", "", *_inputs(self.inputs), ""]
        lint = self.target if declares("lint_targets", self.target) else _DEFAULT_LINT
        tail = _TAIL.format(formats=", ".join(self.formats), target=self.target, lint=lint)
        return "\n".join([*head, *body]) + "\n" + tail


def quoted(text: str) -> str:
    """A text as YAML reads it back: unquoted if that is safe, else in double quotes."""
    if _SAFE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    written = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in written)


def _inputs(inputs: Sequence[InputDraft]) -> Iterator[str]:
    yield "inputs:"
    asked = [one for one in inputs if one.open_dims and one.shape is not None]
    yield f"  {'' if asked else '# '}shapes:                                 # what is measured"
    for one in inputs:
        yield f"  {'' if one in asked else '# '}  {_shape(one)}"
    yield "  # calibration: data.npz                 # one array per input, first axis = samples; without it"
    yield "  #                                       # inputs are random, and scales and parity prove little"
    yield "  # evaluation: data.npz                  # the same to judge by, with `labels` for accuracy"
    if not asked:
        yield "  {}"


def _shape(one: InputDraft) -> str:
    shape = "?" if one.shape is None else "[" + ", ".join(map(str, one.shape)) + "]"
    said = "fixed"
    if one.shape is None:
        said = "of unknown rank: write it here"
    elif one.open_dims:
        which = ", ".join(map(str, one.open_dims))
        said = (
            f"dimension {which} is dynamic, and this a guess"
            if len(one.open_dims) == 1
            else (f"dimensions {which} are dynamic, and these are guesses")
        )
    return f"{quoted(one.name)}: {shape}  # {one.kind}, {said}"


def counted(counts: Mapping[str, int], most: int = 12) -> str:
    """Counts of operators, the most frequent first: ``Conv 26, MaxPool 3``."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    more = f" and {len(ranked) - most} kinds more" if len(ranked) > most else ""
    return ", ".join(f"{name} {count}" for name, count in ranked[:most]) + more
