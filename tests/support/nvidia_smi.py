"""Scripts that answer as nvidia-smi does, for tests without a GPU."""

from __future__ import annotations

import shlex
from collections.abc import Mapping


def answering(fields: Mapping[str, str]) -> str:
    """One that answers queries for these fields, in the order asked; an unknown field is an error with code 2."""
    cases = "".join(f'    {name}) row="$row, {text}" ;;\n' for name, text in fields.items())
    return (
        '#!/bin/sh\nfor word in "$@"; do case "$word" in --query-gpu=*) asked=${word#*=} ;; esac; done\n'
        'row=\nfor name in $(echo "$asked" | tr , " "); do case "$name" in\n'
        f'{cases}    *) echo "Field \\"$name\\" is not a valid field to query."; exit 2 ;;\nesac; done\n'
        'echo "${row#, }"\n'
    )


def answering_for(first: str, others: str) -> str:
    """One that answers any query with one row for GPU 0, another for other indices, and fails for ``none``."""
    return f"#!/bin/sh\ncase $2 in 0) echo {shlex.quote(first)};; none) exit 6;; *) echo {shlex.quote(others)};; esac\n"
