"""Scripts that imitate nvidia-smi, for tests without a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def answering(fields: Mapping[str, str]) -> str:
    """A script that returns these fields in the order of the query; an unknown field is an error with code 2."""
    cases = "".join(f'    {name}) row="$row, {text}" ;;\n' for name, text in fields.items())
    return (
        '#!/bin/sh\nfor word in "$@"; do case "$word" in --query-gpu=*) asked=${word#*=} ;; esac; done\n'
        'row=\nfor name in $(echo "$asked" | tr , " "); do case "$name" in\n'
        f'{cases}    *) echo "Field \\"$name\\" is not a valid field to query."; exit 2 ;;\nesac; done\n'
        'echo "${row#, }"\n'
    )


def answering_for(first: str, others: str) -> str:
    """A script that returns one row for GPU 0 and another for other indices, and fails for ``none``."""
    return f"#!/bin/sh\ncase $2 in 0) echo {shlex.quote(first)};; none) exit 6;; *) echo {shlex.quote(others)};; esac\n"
