"""Several backends on one command line: ``--backend A,B`` makes a case for each of them."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qdqspec import registry
from qdqspec.errors import ConfigError
from qdqspec.types import Case


def weights(text: str) -> dict[str, float]:
    """Parse ``A:2,B``: a weight for each backend, 1 if not stated."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        try:
            value = float(weight or 1)
        except ValueError:
            value = 0.0
        if not name or not 0 < value < math.inf or name in found:
            raise argparse.ArgumentTypeError(f"'{text}' is no list of backends with weights, as A:2,B")
        found[name] = value
    return found


def backends_asked(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The backends of ``--targets``, or of ``--backend`` if it names several; none otherwise.

    Raises `ConfigError` as `split_backends`, and if both are given or there is one target only.
    """
    if arguments.targets is None:
        return split_backends(arguments)
    if arguments.qdq_backend is not None:
        raise ConfigError("--targets and --backend are both given", cure="leave --backend out")
    if len(arguments.targets) < 2:
        raise ConfigError("--targets: one placement for several runtimes needs two backends or more")
    arguments.qdq_backend = ",".join(arguments.targets)
    return split_backends(arguments)


def split_backends(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The backends of ``--backend`` if there are several, else none; ``arguments`` keep the first.

    Raises `ConfigError` for an unknown name and for one that occurs twice.
    """
    given = tuple(name.strip() for name in (arguments.qdq_backend or "").split(","))
    if len(given) == 1:
        return ()
    known = registry.names("backend")
    for name, count in Counter(given).items():
        if name not in known:
            near = registry.did_you_mean(name, known)
            raise ConfigError(f"--backend: unknown backend '{name}'{near}", cure=f"known: {', '.join(known)}")
        if count > 1:
            raise ConfigError(f"--backend: '{name}' is given twice", cure="name each backend once")
    arguments.qdq_backend = given[0]
    return given


def on_backends(cases: Sequence[Case], backends: Sequence[str], targets: Mapping[str, float]) -> list[Case]:
    """Each case on each backend, with these ``targets``; the cases themselves without backends.

    Raises `ConfigError` for a case whose spec chooses its backend.
    """
    if not backends:
        return list(cases)
    for case in cases:
        if case.backend is not None:
            raise ConfigError(
                "the matrix of this spec chooses backends already",
                where=case.name,
                cure="leave --backend out",
            )
    return [replace(_on(case, backend), targets=targets) for case in cases for backend in backends]


def _on(case: Case, backend: str) -> Case:
    name = backend if case.id == "default" else f"{case.id}-{backend}"
    return replace(case, id=name, backend=backend, matrix={**case.matrix, "backend": backend})
