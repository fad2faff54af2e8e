"""Collects items from a spec file: file, case, check. Opens YAML only; never a model.

Reasons for these classes: a ``Module`` so that module-scoped fixtures and conftests work, a collector for
each case so that ``specs/a.qdq.yaml::int8-b8`` selects it and ``--dist loadscope`` keeps it on one worker, a
``Function`` for each check so that fixtures work, and plain names because pytest 9.2 loses a name with
brackets from ``--lf``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qdqspec._core.config import Settings
from qdqspec.app.cases import load_cases, with_paths
from qdqspec.app.plugin._compat import DataModule
from qdqspec.app.plugin.run import CheckFailed, CheckItem, without_traceback
from qdqspec.app.plugin.state import settings_of
from qdqspec.errors import SpecError
from qdqspec.types import Case

# a conftest may replace these fixtures
_CHANGING = ("qdq_model", "qdq_calibration", "qdq_metrics", "qdq_data")


class _Explained(pytest.Collector):
    """A collector that prints input errors without a traceback."""

    # pytest's own Collector narrows the signature of Node in the same way, with the same ignore.
    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:  # type: ignore[override]
        """The message alone, its first line in the summary."""
        text = without_traceback(excinfo.value, self.path, 1)
        return super().repr_failure(excinfo) if text is None else text


class SpecFile(_Explained, DataModule):
    """A ``*.qdq.yaml`` file."""

    cases: tuple[Case, ...] = ()

    def collect(self) -> Iterator[CaseNode]:
        """Its cases; an invalid spec is an error of this file alone."""
        self.cases = load_cases(self.path, settings_of(self.config))
        for case in self.cases:
            yield CaseNode.of(self, case)


class PythonSpecFile(_Explained, pytest.Module):
    """A ``spec_*.py`` module: its module-level ``Spec`` objects, and ordinary tests."""

    cases: tuple[Case, ...] = ()

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """The cases of its specs, named by variable (``squeeze``, ``squeeze-int8-b8``), then its tests."""
        from qdqspec.spec import Spec, is_id

        cases: dict[str, Case] = {}
        for name, spec in vars(self.obj).items():
            for case in spec.cases() if isinstance(spec, Spec) else ():
                case_id = name.lower() if case.id == "default" else f"{name.lower()}-{case.id}"
                if case_id in cases or not is_id(case_id):
                    raise SpecError(
                        f"the variable '{name}' gives a case the id '{case_id}', which is taken or not allowed",
                        where=self.path.name,
                        cure="rename it: small letters, digits and _, each id once",
                    )
                cases[case_id] = replace(case, id=case_id, spec=self.path)
        self.cases = tuple(cases.values())
        for case in self.cases:
            _refuse_far_paths(case, self.path, settings_of(self.config))
            yield CaseNode.of(self, case)
        yield from super().collect()


def _refuse_far_paths(case: Case, path: Path, settings: Settings) -> None:
    """Apply the path restrictions of YAML specs to a spec in Python."""
    from qdqspec.spec import CURE, LEADS_OUT, path_rules

    rules = path_rules(path, settings.root, settings.allow_path)

    def refuse(one: Path | None) -> Path | None:
        if one is not None and (far := rules.far(one)) is not None:
            raise SpecError(f"'{case.id}': {LEADS_OUT.format(text=far)}", where=path.name, cure=CURE)
        return one

    with_paths(replace(case, spec=None), refuse)  # the module itself may be a link


class CaseNode(_Explained):
    """One case of a spec."""

    case: Case

    @classmethod
    def of(cls, parent: pytest.Collector, case: Case) -> CaseNode:
        """A node with the marks of its case."""
        node = cls.from_parent(parent, name=case.id)
        node.case = case
        node.extra_keyword_matches.update(map(str, case.matrix.values()))
        node.extra_keyword_matches.update({case.model.stem, case.quantize.format})
        node.extra_keyword_matches.update(case.quantize.formats, case.tags)
        node.add_marker(pytest.mark.qdq)
        node.add_marker(pytest.mark.tune)
        rules = case.skipping
        if rules.skip is not None:
            node.add_marker(pytest.mark.skip(reason=rules.skip))
        if rules.xfail is not None:
            node.add_marker(
                pytest.mark.xfail(reason=rules.xfail, strict=rules.xfail_strict, raises=CheckFailed)
            )
        if node.config.pluginmanager.has_plugin("xdist"):
            # The scheduler of --dist loadgroup cuts a node id at its last '@'.
            # Cases that choose a runtime are timed together at the end, so one worker runs all of a spec.
            together = node.nodeid if case.backend is None else getattr(parent, "nodeid", "")
            node.add_marker(pytest.mark.xdist_group(together.replace("@", "_")))
        return node

    def collect(self) -> Iterator[CheckItem]:
        """One item per check, checks of a task metric first, so that an unknown metric fails before the search."""
        from qdqspec.checks import needs_of

        first: CheckItem | None = None
        for check in sorted(self.case.checks, key=lambda one: "accuracy" not in needs_of(one)):
            item = CheckItem.of(self, self.case, check, first)
            first = first or item
            yield item


def unchanged_cases(items: Sequence[pytest.Item]) -> Iterator[Case]:
    """The cases of the selected checks that run as their specs state: not skipped, and not changed by fixtures."""
    found: dict[str, Case] = {}
    for item in items:
        if not isinstance(item, CheckItem) or item.case.skipping.unless or item.get_closest_marker("skip"):
            continue
        defined = item._fixtureinfo.name2fixturedefs  # noqa: SLF001
        if all(len(defined.get(name, ())) <= 1 for name in _CHANGING):
            found.setdefault(item.nodeid.rpartition("::")[0], item.case)
    yield from found.values()
