"""Command ``upgrade-check``: tuned models under another version of the runtime, in another Python environment."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec.cases import find_cases, find_specs
from qdqspec.cli.compare import share
from qdqspec.cli.folders import add_folder_words, known_of_folder
from qdqspec.cli.words import FINE, WANTING, Verbs, add_verb, answer, settings_from
from qdqspec.config import Settings, find_folder
from qdqspec.errors import BackendUnavailableError, StateError
from qdqspec.files import RESULT
from qdqspec.types import Case, Upgrade, UpgradeCheck

if TYPE_CHECKING:
    from qdqspec.backends.base import BuildOptions
    from qdqspec.measurement.environment import Environment
    from qdqspec.session import Session

_OPTIONS = (
    "backend",
    "device",
    "threads",
    "seed",
    "cache-dir",
    "backend-option",
    "build-limit",
    "allow-path",
)


def add_verbs(verbs: Verbs) -> None:
    """Declare ``upgrade-check``."""
    parser = add_verb(
        verbs,
        "upgrade-check",
        upgrade_check,
        does="Time tuned models under two versions of the runtime. Their runs are interleaved. Exits 1 "
        "where one is slower than allowed, slower than float, or less accurate there.",
        example="qdqspec upgrade-check specs --python next/bin/python --allow 5%",
        options=_OPTIONS,
    )
    parser.add_argument(
        "what",
        nargs="+",
        metavar="SPEC|CASE|DIR",
        help="Specs, folders of specs, a case (file::case), or folders that `tune -o` wrote.",
    )
    parser.add_argument(
        "--python",
        type=Path,
        required=True,
        metavar="PYTHON",
        help="The interpreter of the other environment, in which qdqspec's dependencies and the other runtime "
        "are installed.",
    )
    parser.add_argument(
        "--allow",
        type=share,
        default=0.05,
        metavar="SHARE",
        help="Allowed slowdown of a tuned model, such as 5%% (default: 5%%).",
    )
    add_folder_words(parser)


def upgrade_check(arguments: argparse.Namespace) -> int:
    """Check all tuned models; return 1 if one fails. Raises if none is known, or the environment cannot be used."""
    from qdqspec.measurement.environment import Environment
    from qdqspec.report.upgrade import upgrade_text, upgrade_to_json
    from qdqspec.session import Session

    settings = replace(settings_from(arguments), mode="measure")
    models = [found for what in arguments.what for found in _models(what, arguments, settings)]
    if not models:
        raise StateError("no spec was found", cure="name specs, or folders that tune -o wrote")
    found: list[Upgrade] = []
    here: dict[str, dict[str, str]] = {}
    there: dict[str, dict[str, str]] = {}
    with closing(Environment(arguments.python)) as environment, closing(Session(settings)) as session:
        for case in (known.case for known in models):
            runtime = session.backends.of(case)
            name = runtime.backend.name
            if name not in here:
                there[name] = _facts(environment, name, runtime.options)
                here[name] = _joined(runtime.backend.probe(runtime.options).facts, runtime.device.details)
        found = [_checked(session, known, environment, arguments.allow) for known in models]
    check = UpgradeCheck(allowed=arguments.allow, here=here, there=there, cases=tuple(found))
    answer(arguments, upgrade_to_json(check), upgrade_text(check))
    return FINE if check.passed else WANTING


@dataclass(frozen=True, slots=True)
class _Known:
    """A case, its name in reports, and the file of its tuned model; ``None`` if that is to be found in the cache."""

    case: Case
    name: str
    tuned: Path | None


def _models(what: str, arguments: argparse.Namespace, settings: Settings) -> Iterator[_Known]:
    """The tuned models that an argument names."""
    folder = Path(what)
    if (folder / RESULT).is_file():
        known = known_of_folder(folder.absolute(), arguments)
        yield _Known(known.case, known.name, known.tuned)
        return
    references = [str(path) for path in find_specs([folder])] if "::" not in what else [what]
    for reference in references:
        for case in find_cases(reference, settings, Path.cwd()):
            own = find_folder(settings, case)
            is_result = (own / RESULT).is_file() and (own / "tuned.onnx").is_file()
            yield _Known(case, case.name, own / "tuned.onnx" if is_result else None)


def _facts(environment: Environment, backend: str, options: BuildOptions) -> dict[str, str]:
    """The facts of a backend there. Raises `BackendUnavailableError` if it is not usable."""
    installed = environment.installed(backend, options)
    if not installed.usable:
        raise BackendUnavailableError(
            f"backend {backend} is not usable there: {installed.why}",
            where=environment.python,
            cure=installed.install or None,
        )
    return _joined(installed.facts, {} if installed.device is None else installed.device.details)


def _joined(facts: Mapping[str, str], details: Mapping[str, str]) -> dict[str, str]:
    """Facts of a backend and details of its device, each once: a name may have spaces in one and not in the other."""
    return {
        **facts,
        **{name: value for name, value in details.items() if name.replace("_", " ") not in facts},
    }


def _checked(session: Session, known: _Known, environment: Environment, allowed: float) -> Upgrade:
    from qdqspec.upgrade import check_upgrade

    work = session.work(known.case)
    found = check_upgrade(work, known.tuned or work.finder.tuned_path, environment, allowed)
    return replace(found, case=known.name)
