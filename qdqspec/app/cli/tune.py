"""Command ``tune``: search without a test run, through the same session as the pytest plugin."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec._core import registry
from qdqspec._core.config import BUILD_OPTIONS, Settings, find_folder, note_owner, other_owner
from qdqspec._core.files import RESULT, explained
from qdqspec._core.progress import Display, Heartbeat, ProgressBar, can_draw
from qdqspec.app.cases import find_cases
from qdqspec.app.cli.arguments import argument, output, settings_from, switch, verb
from qdqspec.app.cli.asked import GROUPS, case_as_asked
from qdqspec.app.cli.output import (
    COLOR,
    FINE,
    IMPOSSIBLE,
    WANTING,
    answer,
    complain,
    refuse_input_as_output,
    writable_folder,
)
from qdqspec.app.cli.verify import reduce_failures
from qdqspec.errors import ConfigError, OutputError, QdqspecError
from qdqspec.types import Case, RunRecord

if TYPE_CHECKING:
    from qdqspec.app.session import Session

_WRITTEN = ("reference.onnx", "tuned.onnx", "tuned_raw.onnx")  # the models that a run writes


@verb(
    "tune",
    "qdqspec tune model.onnx --calibration data.npz --minutes 5 -o tuned/",
    argument("what", "SPEC|MODEL", "A spec, one case of it (file::case), or a model."),
    output(
        "DIR|FILE.onnx",
        "Folder of models and results. For a model it may be a file: the tuned model is copied to it.",
        required=False,
    ),
    switch(
        "--reduce-failures",
        "Reduce the first failed candidate of each case to a few nodes, as verb `reduce` does (DIR/faults).",
    ),
    *GROUPS,
    options=(
        *("backend", "device", "mode", "threads", "jobs", "seed", "time-limit"),
        *("require", "scheme", "baseline"),
        *("cache-dir", "no-cache", "retune", "build-limit", "report", "allow-path", *BUILD_OPTIONS),
        *("cluster", "cluster-device", "cluster-tls"),
    ),
)
def tune(arguments: argparse.Namespace) -> int:
    """Search for the fastest Q/DQ placement of a model or spec. Of a spec: of each case. With several backends
    (--backend A,B): on each of them, and then time the models of all together.

    Returns 1 if a check of a spec fails, 2 if one could not be evaluated.
    """
    is_model = Path(arguments.what).suffix == ".onnx"
    backends = backends_asked(arguments)
    single = is_model and not backends
    settings = settings_from(arguments)
    model_file = _model_file(arguments, single=single)
    if arguments.output is not None and model_file is None:
        settings = replace(settings, output=arguments.output.absolute(), layout="" if single else "case")
    if is_model:
        found: tuple[Case, ...] = (Case(id="default", model=Path(arguments.what).absolute()),)
    elif arguments.what.endswith(".py"):
        raise ConfigError(
            "specs in Python are collected by pytest only",
            where=arguments.what,
            cure=f"run: pytest {arguments.what}",
        )
    else:
        found = find_cases(arguments.what, settings, Path.cwd())
    cases = on_backends([case_as_asked(case, arguments) for case in found], backends)
    _prepare_output(cases, settings)
    if settings.report:
        from qdqspec.app.report.write import refuse_unknown_formats

        refuse_unknown_formats(settings.report)
    session: Session
    if settings.cluster is not None and settings.mode != "plan":
        from qdqspec.app.cluster.session import ClusterSession

        session = ClusterSession(settings, expected=cases)
    else:
        from qdqspec.app.session import Session

        session = Session(settings)
    with closing(session):
        if settings.mode == "plan":
            return _print_plans(cases, session, arguments)
        errors = _judge_cases(cases, session)
        record = session.record()
        if arguments.reduce_failures:
            reduce_failures(session, cases)
    if model_file is not None and not errors:
        from qdqspec.graph.model import load_model
        from qdqspec.graph.storage import save_model

        (case,) = record.cases
        assert case.evidence.output is not None
        tuned = case.evidence.output / "tuned.onnx"
        model_file.parent.mkdir(parents=True, exist_ok=True)
        save_model(load_model(tuned).proto, model_file, inputs=[tuned], base=tuned.parent)
    _write_reports(record, settings, arguments, errors, model_file)
    if errors:
        return IMPOSSIBLE
    wanting = {"fail", "inconclusive"} if "conclusive" in settings.require else {"fail"}
    results = [result for each in record.cases for result in each.results]
    return WANTING if any(r.severity == "error" and r.verdict.outcome in wanting for r in results) else FINE


def _model_file(arguments: argparse.Namespace, *, single: bool) -> Path | None:
    """The file that ``-o FILE.onnx`` names for the tuned model of a bare model, else ``None``."""
    output: Path | None = arguments.output
    if output is None or output.suffix != ".onnx" or output.is_dir():
        return None
    if not single:
        raise ConfigError(
            "a file holds one tuned model, and this makes several", where=output, cure="name a folder with -o"
        )
    refuse_input_as_output(output, [Path(arguments.what)])
    return output.absolute()


def _prepare_output(cases: list[Case], settings: Settings) -> None:
    """Create the folders of the cases, before hours of work, and claim a folder that is given with ``-o``.

    Raises `OutputError` if the folder holds the results of another model, or its models would replace a given one.
    """
    for case in cases:
        folder = find_folder(settings, case)
        for name in _WRITTEN:
            refuse_input_as_output(folder / name, [case.model])
        if settings.mode == "plan":
            continue
        writable_folder(folder)
        if settings.layout == "spec/case":
            continue
        other, results = other_owner(folder, case), (RESULT, "trials.jsonl", "tuned.onnx")
        if other is not None and any((folder / name).exists() for name in results):
            raise OutputError(
                f"this folder holds the results of another model or spec ({other})",
                where=folder,
                cure="choose another folder with -o, or remove this one",
            )
        with explained("the output folder", folder, "choose another with -o"):
            note_owner(folder, case)


def _print_plans(cases: list[Case], session: Session, arguments: argparse.Namespace) -> int:
    from qdqspec.graph.regions.forecast import forecast_to_json

    plans = {case.name: session.planned(case) for case in cases}
    listed = [
        {"case": name, "plan": plan.text, **asdict(plan), "forecast": forecast_to_json(plan.forecast)}
        for name, plan in plans.items()
    ]
    answer(arguments, {"plans": listed}, "\n".join(f"{name}: {plan.text}" for name, plan in plans.items()))
    return FINE


def _judge_cases(cases: list[Case], session: Session) -> list[str]:
    """Evaluate the checks of each case, or search and measure if it has none, and time the runtimes of one model
    together. Print and return the errors, each once.

    A case that cannot run on this machine is an error too, and the others are evaluated.
    """
    errors: list[str] = []
    for case in cases:
        found = session.availability(case)
        if not found.usable:
            lacking = found.error(case.backend or session.settings.backend)
            session.skip(case, "; ".join(filter(None, (lacking.what, lacking.cure))))
            errors.append(str(lacking))
            continue
        with _show_progress(session):
            for check in case.checks:
                try:
                    session.judge(case, check)
                except QdqspecError as error:
                    errors.append(str(error))
            if not case.checks:
                try:
                    session.evidence(case, frozenset({"latency", "parity"}))
                except QdqspecError as error:
                    if len(cases) == 1:
                        raise
                    session.skip(case, str(error))
                    errors.append(f"{case.name}: {error}")
    with _show_progress(session):
        try:
            session.compare_runtimes()
        except QdqspecError as error:
            errors.append(str(error))
    errors = [*dict.fromkeys(errors)]
    for text in errors:
        complain(f"qdqspec: {text}")
    return errors


@contextmanager
def _show_progress(session: Session) -> Iterator[None]:
    display: Display = (
        ProgressBar(file=sys.stderr, colored=COLOR.get() != "never")
        if can_draw(is_terminal=sys.stderr.isatty())
        else Heartbeat(complain)
    )
    session.watch = display.update
    try:
        yield
    finally:
        session.watch = None
        display.close()


def _write_reports(
    record: RunRecord,
    settings: Settings,
    arguments: argparse.Namespace,
    errors: Sequence[str],
    model_file: Path | None,
) -> None:
    from qdqspec.app.report.compare import runtimes_text
    from qdqspec.app.report.record import record_to_json
    from qdqspec.app.report.tables import summary_table, warning_lines
    from qdqspec.app.report.write import annotation_lines, is_github, write_reports, write_results

    write_results(record)
    write_reports(record, settings.report)
    folders = [(case.evidence.case.name, case.evidence.output) for case in record.cases]
    data: dict[str, Any] = {}
    if arguments.json:
        outputs = {name: str(folder) for name, folder in folders if folder is not None}
        reports = [str(path) for path in settings.report]
        data = {**record_to_json(record), "outputs": outputs, "reports": reports, "errors": list(errors)}
        data["model_file"] = None if model_file is None or errors else str(model_file)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() and not arguments.json else None
    lines = [summary_table(record, width=width)]
    lines += [  # notes of the table name the inconclusive checks
        f"{'warning' if result.severity == 'warn' else 'fail'}: "
        f"{case.evidence.case.name}::{result.id} - {result.verdict.headline}"
        for case in record.cases
        for result in case.results
        if result.verdict.outcome == "fail"
    ]
    lines += warning_lines(record)
    if record.runtimes:
        lines.append(f"\n{runtimes_text(record.runtimes)}\n")
    lines += [f"Models and measurements: {folder}" for _, folder in folders if folder is not None]
    if model_file is not None and not errors:
        is_unchanged = record.cases[0].evidence.status == "unchanged"
        lines.append(
            f"{'The model is unchanged; a copy is' if is_unchanged else 'Tuned model'}: {model_file}"
        )
    for path in settings.report:
        lines += annotation_lines(record, settings.root) if is_github(path) else [f"Report: {path}"]
    answer(arguments, data, "\n".join(lines))


def backends_asked(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The backends of ``--backend`` if it names several, and ``arguments`` get the first; none otherwise.

    Raises `ConfigError` for an unknown name, and for one that occurs twice.
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
                "this spec chooses its backend already",
                where=case.name,
                cure="leave --backend out",
            )
    return [
        replace(
            case,
            id=backend if case.id == "default" else f"{case.id}-{backend}",
            backend=backend,
            matrix={**case.matrix, "backend": backend},
        )
        for case in cases
        for backend in backends
    ]
