"""Commands ``compare`` and ``upgrade-check``, about finished results."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec._core.config import find_folder
from qdqspec._core.files import RESULT
from qdqspec._core.node_digests import changes_text
from qdqspec._core.records import to_data
from qdqspec.app.cases import find_cases, find_specs
from qdqspec.app.cli.command import (
    FINE,
    IMPOSSIBLE,
    WANTING,
    answer,
    argument,
    input_options,
    inputs_given,
    note,
    refuse_options,
    settings_from,
    verb,
)
from qdqspec.errors import BackendUnavailableError, ConfigError, StateError
from qdqspec.types import Case, DeviceKey, Evidence, Inputs, ShapeProfile, TuneRules, Upgrade, UpgradeCheck

if TYPE_CHECKING:
    from qdqspec.app.session import Session

_TUNED = "tuned.onnx"
_OF_FOLDERS = "folders of results"


def share(text: str) -> float:
    """``5%`` or ``0.05``; not 5, which would allow six times the time."""
    value = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    if not 0 <= value < (math.inf if text.endswith("%") else 1):
        raise argparse.ArgumentTypeError(f"'{text}' is no share such as 5% or 0.05")
    return value


_FOLDER_INPUTS = input_options(
    "the model in a DIR",
    shapes_of="dynamic inputs of a DIR (default: those it was tuned with)",
    data="Inputs of a DIR (default: random ones).",
)


@verb(
    "compare",
    "qdqspec compare before.json after.json --fail-on 5%\n  qdqspec compare out/first out/second",
    argument("before", "RUN_A|DIR", "A record that --qdq-json wrote, or DIR.", type=Path),
    argument("after", "RUN_B|DIR", "A later record of the same device, or DIR.", type=Path),
    argument("more", "DIR", "Further folders of results.", type=Path, nargs="*"),
    *_FOLDER_INPUTS,
    argument(
        "--fail-on",
        "SHARE",
        "Exit 1 only if a model is slower by more than this share, such as 5% (default: any proved slowdown).",
        type=share,
    ),
    options=("threads", "seed", "device", "build-limit", "backend-option"),
)
def compare(arguments: argparse.Namespace) -> int:
    """Compare two run records: cases that became faster or slower. Exits 1 if one is proved slower, and 2
    if no case was timed in both. Of folders that `tune -o` wrote for one model on several runtimes: build and time
    their models together.
    """
    given = [arguments.before, arguments.after, *arguments.more]
    if any(path.is_dir() for path in given):
        refuse_options(arguments, "fail-on", "two records")
        if record := next(filter(Path.is_file, given), None):
            raise ConfigError(
                "a record is not compared with a folder", where=record, cure="name two records, or folders"
            )
        return _compare_folders(given, arguments)
    refuse_options(arguments, "shapes data values", _OF_FOLDERS)
    if arguments.more:
        raise ConfigError("more than two records are given", cure="compare two of them at a time")
    from qdqspec.app.report.compare import compare_runs, comparison_text, comparison_to_json
    from qdqspec.app.report.record import read_record

    found = compare_runs(read_record(arguments.before), read_record(arguments.after))
    allowed = arguments.fail_on or 0.0
    code = WANTING if any(case.is_slower_beyond(allowed) for case in found.cases) else FINE
    if all(case.change is None for case in found.cases):
        code = IMPOSSIBLE
    return answer(arguments, comparison_to_json(found, allowed), comparison_text(found), code=code)


def _compare_folders(folders: list[Path], arguments: argparse.Namespace) -> int:
    """Time the float and tuned models of results on several runtimes, interleaved, and print their ratios."""
    from qdqspec.app.evidence.timing import compare_runtimes, models_of
    from qdqspec.app.report.compare import runtimes_text
    from qdqspec.app.session import Session

    known = [_of_folder(folder.absolute(), arguments) for folder in folders]
    cure = "name one folder for each runtime, of the same model"
    if len({found.model_sha256 for _, found in known}) > 1:
        first, other = next(
            (known[0][1], found) for _, found in known if found.model_sha256 != known[0][1].model_sha256
        )
        what = changes_text(first.model_nodes, other.model_nodes)
        raise ConfigError(
            f"these folders are of different models: {', '.join(map(str, folders))}{what and f': {what}'}",
            cure=cure,
        )
    if len({found.backend for _, found in known}) < len(known):
        raise ConfigError(
            f"these folders are of one runtime: {', '.join(map(str, folders))}",
            cure=f"{cure}; to compare two runs, name the records that `tune --report run.json` writes",
        )
    with closing(Session(replace(settings_from(arguments), mode="measure"))) as session:
        for case, found in known:
            _note_differences(case, found, session.runtime(case).device, arguments)
        models = []
        for case, found in known:
            prepared, search, parity = session.work(case).prepared, found.search, found.parity
            if search is None or search.unchanged:
                models.append(models_of(prepared))
                continue
            tuned, sqnr_db = case.model.with_name(_TUNED), None if parity is None else parity.sqnr_db
            models.append(models_of(prepared, tuned, search.winner, sqnr_db))
        name = known[0][1].case.spec_name
        compared = compare_runtimes(name, models, lambda progress: note(f"{name}: {progress.doing}"))
    return answer(arguments, {"runtimes": [to_data(compared)]}, runtimes_text([compared]))


def _of_folder(folder: Path, arguments: argparse.Namespace) -> tuple[Case, Evidence]:
    """The result of ``tune -o`` in a folder: the reference as a case, and the evidence."""
    from qdqspec.app.report.record import read_case

    found = read_case(folder).evidence
    limit = None if found.search is None else found.search.limits.min_sqnr_db
    profiles = Inputs(profiles=found.profiles or (ShapeProfile(),))
    case = Case(
        id="default",
        model=folder / "reference.onnx",
        backend=found.backend,
        inputs=inputs_given(profiles, arguments, arguments.values),
        tune=TuneRules(min_sqnr_db=limit or "none"),
    )
    return case, found


def _note_differences(case: Case, found: Evidence, here: DeviceKey, arguments: argparse.Namespace) -> None:
    """Note what differs from the run that made a result: random inputs in place of data, threads, options, versions."""
    used = None if found.parity is None else found.parity.data
    name, folder = found.case.name, os.path.relpath(case.model.parent)
    if arguments.data is None and used in ("calibration", "evaluation"):
        note(f"{name}: inputs are random here; {folder} was tuned with {used} data: give it with --data")
    was, now = (dict(device.details) for device in (found.device, here))
    other = sorted(key for key in {*was, *now} - {"python", "system"} if was.get(key) != now.get(key))
    if other:
        before, after = (
            ", ".join(f"{key} {facts.get(key, 'by default')}" for key in other) for facts in (was, now)
        )
        note(f"{name}: {folder} was tuned with {before}; here: {after} (--threads, --backend-option)")


@verb(
    "upgrade-check",
    "qdqspec upgrade-check specs --python next/bin/python --allow 5%",
    argument(
        "what",
        "SPEC|CASE|DIR",
        "Specs, folders of specs, a case (file::case), or folders that `tune -o` wrote.",
        nargs="+",
    ),
    argument(
        "--python",
        "PYTHON",
        "The interpreter of the other environment, in which qdqspec's dependencies and the other runtime are "
        "installed.",
        type=Path,
        required=True,
    ),
    argument(
        "--allow",
        "SHARE",
        "Allowed slowdown of a tuned model, such as 5% (default: 5%).",
        type=share,
        default=0.05,
    ),
    *_FOLDER_INPUTS,
    options=(
        *("backend", "device", "threads", "seed", "cache-dir", "backend-option", "build-limit"),
        "allow-path",
    ),
)
def upgrade_check(arguments: argparse.Namespace) -> int:
    """Time tuned models under two versions of the runtime. Their runs are interleaved. Exits 1 where one is slower
    than allowed, slower than float, or less accurate there.
    """
    from qdqspec.app.report.compare import upgrade_text
    from qdqspec.app.session import Session
    from qdqspec.app.upgrade import check_upgrade
    from qdqspec.backends import Environment

    if not any((Path(what) / RESULT).is_file() for what in arguments.what):
        refuse_options(arguments, "shapes data values", _OF_FOLDERS)
    settings = replace(settings_from(arguments), mode="measure")
    checked: list[Upgrade] = []
    here: dict[str, dict[str, str]] = {}
    there: dict[str, dict[str, str]] = {}
    with ExitStack() as opened:
        session = opened.enter_context(closing(Session(settings)))
        models = [found for what in arguments.what for found in _models(what, arguments, session)]
        if not models:
            raise StateError("no spec was found", cure="name specs, or folders that tune -o wrote")
        environment = opened.enter_context(closing(Environment(arguments.python)))
        for case, _, _ in models:
            runtime = session.runtime(case)
            name, options = runtime.backend.name, runtime.options
            if name in here:
                continue
            installed = environment.installed(name, options)
            if not installed.usable:
                raise BackendUnavailableError(
                    f"backend {name} is not usable there: {installed.why}",
                    where=environment.python,
                    cure=installed.install or None,
                )
            details = {} if installed.device is None else installed.device.details
            there[name] = _joined(installed.facts, details)
            here[name] = _joined(runtime.backend.probe(options).facts, runtime.device.details)
        for case, name, tuned in models:
            work = session.work(case)
            found = check_upgrade(work, tuned or work.tuned_path, environment, arguments.allow)
            checked.append(replace(found, case=name))
    check = UpgradeCheck(allowed=arguments.allow, here=here, there=there, cases=tuple(checked))
    data = {"passed": check.passed, **to_data(check)}
    return answer(arguments, data, upgrade_text(check), code=FINE if check.passed else WANTING)


def _joined(facts: Mapping[str, str], details: Mapping[str, str]) -> dict[str, str]:
    """Each fact once: a name may have spaces in the facts of a backend and not in the details of its device."""
    return {**facts, **{key: one for key, one in details.items() if key.replace("_", " ") not in facts}}


def _models(
    what: str, arguments: argparse.Namespace, session: Session
) -> Iterator[tuple[Case, str, Path | None]]:
    """The tuned models that an argument names, with their names in reports; a model without a file is in the cache."""
    if (Path(what) / RESULT).is_file():
        case, found = _of_folder(Path(what).absolute(), arguments)
        _note_differences(case, found, session.runtime(case).device, arguments)
        yield case, found.case.name, case.model.with_name(_TUNED)
        return
    references = [str(path) for path in find_specs([Path(what)])] if "::" not in what else [what]
    for case in (
        case for reference in references for case in find_cases(reference, session.settings, Path.cwd())
    ):
        folder = find_folder(session.settings, case)
        is_result = (folder / RESULT).is_file() and (folder / _TUNED).is_file()
        yield case, case.name, folder / _TUNED if is_result else None
