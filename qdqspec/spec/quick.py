"""Specs that are right, read in a small part of the time.

libyaml's parser is some forty times as fast as ruamel.yaml's, and its words about a wrong file are not ours; it reads
YAML 1.1, which differs in corners that a spec has no use for. So it is asked first, and believed only where nothing at
all is wrong and none of these corners is met. Everything else is read again, by the parser that explains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from qdqspec.spec.locate import Document, Reader

# Where the two differ, as two hundred thousand drawn texts found, or may: tabs, line breaks that YAML 1.2 has no more,
# what cannot be printed, directives and markers of documents, comments that begin in the head of a block of text, and
# anchors that end in anything but a space.
_CORNERS = re.compile(
    r"[\t\x00-\x08\x0b-\x1f\x7f-\xa0\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]"
    r"|^(?:%|---|\.\.\.)|[|>][-+\d]*#|&[\w-]*[^\w\s-]",
    re.MULTILINE,
)


def read_quickly(text: str) -> Document | None:
    """What `read_yaml` reads; ``None`` where it would have anything to say, and where that cannot be told."""
    if _CORNERS.search(text.replace("\r\n", "\n")):
        return None
    try:
        # The classes that the parser itself knows: where a test has PyYAML imported twice, those of `yaml` are others.
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
