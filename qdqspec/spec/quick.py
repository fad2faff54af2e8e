"""Fast reader for valid specs.

libyaml's parser is some forty times as fast as ruamel.yaml's, but its error messages are not suitable; it
reads YAML 1.1, which differs in details that a spec does not need. So it is used first, and its result is
accepted only if the file is valid and has none of these details. All other files are read again by the parser
that reports problems.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qdqspec.spec.locate import Document, Reader

# Where the two parsers differ, found with two hundred thousand random texts, or may differ: tabs, line breaks
# that YAML 1.2 does not have, non-printable characters, directives and document markers, comments in the head
# of a block scalar, and anchors that end in anything but a space.
_CORNERS = re.compile(
    r"[\t\x00-\x08\x0b-\x1f\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"
    r"|^(?:%|---|\.\.\.)|[|>][-+\d]*#|&[\w-]*[^\w\s-]",
    re.MULTILINE,
)


def read_quickly(text: str) -> Document | None:
    """The document that `read_yaml` would return; ``None`` if it would report a problem, or if that is unknown."""
    if _CORNERS.search(text.replace("\r\n", "\n")):
        return None
    try:
        # The parser's own classes: if a test imports PyYAML twice, those of `yaml` are different objects.
        from yaml import _yaml
    except ImportError:  # PyYAML without libyaml
        return None
    try:
        found = Reader(text, _events(_yaml.CParser(text)), _yaml).read()
    except (_yaml.YAMLError, ValueError, ArithmeticError, LookupError):
        return None
    return None if found.problems else found


def _events(parser: Any) -> Iterator[Any]:
    while parser.check_event():
        yield parser.get_event()
