"""Command ``reduce``: the smallest part of a model that still fails on a backend, for a bug report."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from qdqspec.app.cli.arguments import MODEL, argument, input_options, model_given, output, settings_from, verb
from qdqspec.app.cli.output import FINE, answer, complain, writable_folder
from qdqspec.errors import StateError
from qdqspec.types import NOT_CANDIDATES, Case

if TYPE_CHECKING:
    from qdqspec.app.reduce import Reduced
    from qdqspec.app.session import Session

MINUTES = 5.0


@verb(
    "reduce",
    "qdqspec reduce model.qdq.onnx -o fault/",
    MODEL,
    output("DIR", "Folder for the reduced model and the program."),
    argument(
        "--minutes",
        "M",
        f"Time limit; the smallest model by then is written (default: {MINUTES:g}).",
        type=float,
        default=MINUTES,
    ),
    *input_options(),
    options=("backend", "device", "threads", "seed", "build-limit", "backend-option", "plugin"),
)
def reduce(arguments: argparse.Namespace) -> int:
    """Reduce a model that a backend fails on to a few nodes. They have random weights and fail in the same way:
    the backend rejects them or crashes. A program that shows it is written too.
    """
    from qdqspec.app.reduce import reduce_model, with_shapes
    from qdqspec.backends.base import BuildOptions
    from qdqspec.backends.isolation.isolated import Isolated

    settings = settings_from(arguments)
    model = model_given(arguments.model, arguments.values)
    if arguments.shapes is not None:
        model = with_shapes(model, arguments.shapes)
    folder = writable_folder(arguments.output.absolute())
    with closing(Isolated(settings.backend)) as backend:
        found = reduce_model(
            model,
            backend,
            BuildOptions.of(settings),
            folder,
            seconds=60 * arguments.minutes,
            seed=settings.seed,
        )
    data = {**asdict(found), "model": str(found.model), "program": str(found.program)}
    answer(arguments, data, reduced_text(found))
    return FINE


def reduce_failures(session: Session, cases: Iterable[Case]) -> None:
    """Reduce the first candidate of each case that failed to build or run, into ``faults/`` of its folder."""
    from qdqspec._core.files import TemporaryFolder
    from qdqspec.app.preparation.files import write_placement
    from qdqspec.app.preparation.stored import make_folder
    from qdqspec.app.reduce import reduce_model
    from qdqspec.graph.model import load_model

    for case in cases:
        setup, found = session.work(case).prepared, session.work(case).found
        trials = () if found is None else found.result.trials
        failed = [t for t in trials if not t.ok and t.phase not in NOT_CANDIDATES and not t.subgraph]
        for trial in failed[:1]:
            folder = setup.output / "faults" / f"{trial.number:03d}-{trial.placement.digest}"
            complain(f"{case.name}: trial {trial.number} failed; it is reduced")
            with TemporaryFolder() as scratch:
                path = scratch / "candidate.onnx"
                write_placement(setup, trial.placement, path)
                make_folder(folder)
                try:
                    options = setup.resources.options
                    reduced = reduce_model(
                        load_model(path), setup.backend, options, folder, seconds=60 * MINUTES
                    )
                except StateError as error:
                    complain(f"{case.name}: trial {trial.number}: {error}")
                else:
                    complain(f"{case.name}: {reduced_text(reduced)}")


def reduced_text(found: Reduced) -> str:
    """The reduced model as text, and its folder."""
    lines = [
        f"{found.nodes_before} nodes reduced to {found.nodes} in {found.attempts} attempts ({found.seconds:.0f} s): "
        + found.failure.partition("\n")[0],
        f"Model and program: {found.model}, {found.program.name}",
    ]
    if found.kept:
        lines.append(f"The fault needs the values of {', '.join(found.kept)}; all other weights are random.")
    if not found.complete:
        lines.append("The time ended before nothing more could be removed: give it more with --minutes.")
    return "\n".join(lines)
