"""Several backends on one command line: ``--backend onnxruntime,openvino`` makes a case for each of them."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from qdqspec import registry
from qdqspec.errors import ConfigError
from qdqspec.types import Case


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


def on_backends(cases: Sequence[Case], backends: Sequence[str]) -> list[Case]:
    """Each case on each backend; the cases themselves without backends.

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
    return [_on(case, backend) for case in cases for backend in backends]


def _on(case: Case, backend: str) -> Case:
    name = backend if case.id == "default" else f"{case.id}-{backend}"
    return replace(case, id=name, backend=backend, matrix={**case.matrix, "backend": backend})
