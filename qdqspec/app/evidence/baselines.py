"""Committed baselines: ``__baselines__/<spec>/<device>.json`` beside a spec.

A file holds, for each case and check of its spec, the ratio tuned / reference on one device, with the raw
samples it was computed from. Keys are sorted and each build's samples are on one line, so that a diff is
readable. The input is not trusted: any bytes give a baseline or one clear error.

An entry is obsolete if no check of its spec uses it. The spec decides, not the run: the entry of a check that is
skipped on this machine is still in use.

The facts that determine a model's speed must be equal in a run that is compared: model, quantization rules, shapes,
clock. The device is the file's name. Versions, processor frequencies and the like are reported only.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from filelock import FileLock, Timeout
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from qdqspec._core.files import explained, shared_folder, write_whole
from qdqspec._core.node_digests import changes_text
from qdqspec._core.records import content_sum, problem_text, read_json, record_of
from qdqspec.checks import requested
from qdqspec.errors import OutputError, StateError
from qdqspec.types import (
    SPEC_ENDINGS,
    BaselineFigure,
    Case,
    Clock,
    DeviceKey,
    Interval,
    name_of_spec,
)
from qdqspec.types.requests import BaselineRequest

FOLDER = "__baselines__"
SCHEMA_VERSION: Final = 1
_LARGEST = 64 << 20  # bytes; a file of a thousand cases has a tenth of it
# a rank test compares all pairs of rounds; a second, longer measurement takes some three hundred
_MOST_ROUNDS = 20_000
_REMEMBERED = 20  # past figures kept in an entry
_PATIENCE = 60.0  # seconds; a file is written in milliseconds
_RENEW = "restore it from version control, or write it anew with --qdq-update=changed"
_SUM = "sum"  # the key of an entry's own checksum
_QUANTIZE = ("format", "calibration", "weights", "activations", "outputs")  # rules that the ratio depends on

Name: TypeAlias = tuple[str, str]  # case and entry: ("int8-b8", "regression")
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Times = tuple[tuple[Milliseconds, ...], ...]  # one sequence for each fresh build


class _Part(BaseModel):
    """One JSON object. Unknown keys, which a newer minor version may write, are ignored."""

    model_config = ConfigDict(frozen=True)


class RoleTimes(_Part):
    """The samples of one role on both clocks, build by build; ``cpu_ms`` is empty if it was not measured.

    ``first`` are, sample by sample, runs that followed another model's.
    """

    wall_ms: Times
    cpu_ms: Times = ()
    first: RoleTimes | None = None

    def on(self, clock: Clock) -> Times:
        """The samples on a clock."""
        return self.cpu_ms if clock == "cpu" else self.wall_ms

    def between(self, clock: Clock) -> Times:
        """Sample by sample, the geometric mean of both conditions; of runs in a row where ``first`` is missing."""
        if self.first is None:
            return self.on(clock)
        builds = zip(self.on(clock), self.first.on(clock), strict=True)
        return tuple(tuple(math.sqrt(a * b) for a, b in zip(*build, strict=True)) for build in builds)


def _require_finite(ratio: Interval) -> Interval:
    if not (0 < ratio.median < math.inf and 0 <= ratio.low < math.inf and 0 < ratio.high < math.inf):
        raise ValueError("a ratio and its bounds are positive and finite")
    return ratio


class Figure(_Part):
    """A ratio tuned / reference, the time it was measured (ISO 8601, UTC), and the changes since the previous one."""

    ratio: Annotated[Interval, AfterValidator(_require_finite)]
    recorded: str = ""
    changed: tuple[str, ...] = ()


class Conditions(_Part):
    """The conditions of a ratio, measured at an ISO 8601 time.

    ``model_sha256``, ``rules`` and ``clock`` must be equal in two runs that are compared; differences in
    ``environment`` and ``scheme`` are only reported. ``nodes`` are the digests of the model (`_core.node_digests`).
    """

    clock: Clock
    model_sha256: str
    rules: dict[str, Any]
    scheme: str
    environment: dict[str, str] = Field(default_factory=dict)
    recorded: str = ""
    nodes: str = Field("", exclude=True)


class Entry(Figure, Conditions):
    """The baseline of one check of one case; ``history`` are the past figures, the oldest first."""

    samples: dict[Literal["tuned", "reference"], RoleTimes]
    history: tuple[Figure, ...] = ()

    def after(self, old: Entry) -> Entry:
        """This entry with an old one as the latest of its history, and all differences that may explain the renewal."""
        past = Figure(ratio=old.ratio, recorded=old.recorded, changed=old.changed)
        changed = (*old._unlike(self), *old.differences(self))
        return self.model_copy(update={"history": (*old.history, past)[-_REMEMBERED:], "changed": changed})

    def figures(self, device: str) -> tuple[BaselineFigure, ...]:
        """The past figures, the oldest first, and the present one."""
        return tuple(record_of(BaselineFigure, each, device=device) for each in (*self.history, self))

    def why_incomparable(self, now: Conditions) -> str:
        """The reason why the entry and a run are not comparable, or nothing."""
        return next(self._unlike(now), "")

    def _unlike(self, now: Conditions) -> Iterator[str]:
        known = {"model": self.model_sha256[:12], "clock": self.clock, **self.rules}
        found = {"model": now.model_sha256[:12], "clock": now.clock, **now.rules}
        for name in ("model", "clock", *sorted(self.rules.keys() & now.rules.keys())):
            if known[name] != found[name]:
                what = changes_text(self.nodes, now.nodes) if name == "model" else ""
                values = f"{name} was {_value_text(known[name])}, is {_value_text(found[name])}"
                yield f"{values}: {what}" if what else values

    def differences(self, now: Conditions) -> tuple[str, ...]:
        """Other differences, which may explain a change but do not prevent a comparison."""
        notes = [] if self.scheme == now.scheme else [f"placement: was {self.scheme}, is {now.scheme}"]
        for name in sorted(self.environment.keys() | now.environment.keys()):
            old, new = self.environment.get(name, "unknown"), now.environment.get(name, "unknown")
            if old != new:
                notes.append(f"{name}: was {old}, is {new}")
        return tuple(notes)

    @model_validator(mode="after")
    def _has_whole_rounds(self) -> Self:
        times = [self.samples[role].on(self.clock) for role in ("tuned", "reference") if role in self.samples]
        lengths = {len(build) for builds in times for build in builds}
        if len(times) != 2 or not all(times) or len(lengths) != 1 or 0 in lengths:
            raise ValueError("tuned and reference need samples on the gating clock, equally many a build")
        for role in self.samples.values():
            first = role.on(self.clock) if role.first is None else role.first.on(self.clock)
            if [*map(len, first)] != [*map(len, role.on(self.clock))]:
                raise ValueError("each sample needs a first run, or none has one")
        if (rounds := max(sum(map(len, builds)) for builds in times)) > _MOST_ROUNDS:
            raise ValueError(f"{rounds:,} samples of a model are more than {_MOST_ROUNDS:,}")
        return self


class Baseline(_Part):
    """The content of a baseline file; ``models`` are digests of nodes (`_core.node_digests`) by the model's hash."""

    schema_version: Literal[1] = SCHEMA_VERSION
    device: str
    cases: dict[str, dict[str, Entry]]
    models: dict[str, str] = Field(default_factory=dict)

    def entry(self, name: Name) -> Entry | None:
        """The entry of a case's check, with the digests of its model."""
        entry = self.cases.get(name[0], {}).get(name[1])
        return entry and entry.model_copy(update={"nodes": self.models.get(entry.model_sha256, "")})

    def names(self) -> tuple[Name, ...]:
        """The names of all entries, sorted."""
        return tuple(sorted((case, check) for case, checks in self.cases.items() for check in checks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """An entry to write, the ratio it replaces, and the digests of its model's nodes."""

    file: Path
    device: str
    name: Name
    old: float | None
    entry: Entry
    nodes: str = ""


def baseline_file(case: Case, device: DeviceKey) -> Path | None:
    """The path of the baseline file of a case's spec for a device; ``None`` for a case without a spec."""
    if case.spec is None:
        return None
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", device.key).strip("-.")[:120] or "device"
    return baseline_folder(case.spec) / f"{stem}.json"


def baseline_folder(spec: Path) -> Path:
    """The folder of a spec's baselines; of ``a.qdq.yml`` another one if there is ``a.qdq.yaml`` too."""
    name = name_of_spec(spec)
    files = (spec.with_name(f"{name}{ending}") for ending in SPEC_ENDINGS)
    first = next((file for file in files if file.exists()), spec)
    return spec.parent / FOLDER / (name if first.name == spec.name else spec.name)


def find_baselines(path: Path) -> list[Path]:
    """The file named, or all baselines below a folder, sorted."""
    if not path.is_dir():
        return [path]
    found = (file for file in path.rglob("*.json") if file.absolute().parent.parent.name == FOLDER)
    return sorted(filter(Path.is_file, found))


def read_baseline(path: Path) -> Baseline | None:
    """The baselines in a file, ``None`` if it does not exist. Raises `StateError` if it is damaged."""
    try:
        content = read_json(path, most_bytes=_LARGEST)
        known = Baseline.model_validate(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"the baseline cannot be read: {error.strerror}", where=path, cure=_RENEW) from None
    except ValueError as error:
        what = f"this is not a baseline: {problem_text(error, whole='the file')}"
        raise StateError(what, where=path, cure=_RENEW) from None
    for case, check in known.names():
        written = content["cases"][case][check]
        # An entry without a checksum is written by hand. A later version writes one.
        signed = _SUM in written or written.keys() - Entry.model_fields.keys()
        if signed and written.get(_SUM) != _sum(known.device, (case, check), written):
            what = f"entry {case}::{check} was changed since it was written"
            raise StateError(what, where=path, cure=_RENEW)
    return known


def _sum(device: str, name: Name, entry: Mapping[str, Any]) -> str:
    """The checksum of an entry: over its content, its name and its device."""
    return content_sum([device, *name, {key: value for key, value in entry.items() if key != _SUM}])


def update_baseline(
    path: Path,
    device: str,
    put: Mapping[Name, Entry],
    drop: Iterable[Name] = (),
    models: Mapping[str, str] | None = None,
) -> None:
    """Put entries into a file and drop others; a file without entries is removed.

    ``models`` are the digests of nodes, by hash of the model; digests of models without an entry are removed.
    ``device`` is the device of the new entries; a file that only loses entries keeps its device. The new entries
    replace a damaged file, and a file of another device. Processes that change one file wait for each other.
    Raises `OutputError` if the file cannot be written.
    """
    with _alone(path):
        known = None
        with suppress(StateError):  # a damaged file is replaced
            known = read_baseline(path)
        if known is None or (put and known.device != device):
            known = Baseline(device=device, cases={})
        cases = {case: dict(checks) for case, checks in known.cases.items()}
        for case, check in drop:
            cases.get(case, {}).pop(check, None)
        for (case, check), entry in put.items():
            cases.setdefault(case, {})[check] = entry
        kept = {case: checks for case, checks in cases.items() if checks}
        if kept:
            used = {entry.model_sha256 for checks in kept.values() for entry in checks.values()}
            digests = {**known.models, **(models or {})}
            digests = {sha256: digests[sha256] for sha256 in digests if sha256 in used and digests[sha256]}
            new = Baseline(device=known.device, cases=kept, models=digests)
            data = new.model_dump(mode="json")
            for case, check in new.names():
                entry = data["cases"][case][check]
                entry[_SUM] = _sum(new.device, (case, check), entry)
            text = json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"
            # JSON strings contain no line break, so the pattern matches arrays of numbers only.
            text = re.sub(r"\[\n[-+.\deE,\s]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
            write_whole(path, text, what="the baseline", make_folder=True)
        else:
            with explained("the baseline", path, "make the folder writable"):
                path.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock the file against other processes of this user. The lock file is elsewhere: baselines are committed."""
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    try:
        with FileLock(shared_folder("locks") / f"baseline-{name}.lock", timeout=_PATIENCE):
            yield
    except Timeout:
        what = f"another run has been writing the baseline for {_PATIENCE:.0f} s"
        raise OutputError(what, where=path, cure="wait for it to end, or end it") from None


def obsolete_entries(folder: Path, used: Collection[Name]) -> tuple[tuple[Path, Name], ...]:
    """Entries below a spec's baseline folder, for any device, that are not ``used``; a damaged file has none."""
    found: list[tuple[Path, Name]] = []
    for file in sorted(folder.glob("*.json")):
        with suppress(StateError):
            known = read_baseline(file)
            found += [(file, name) for name in (known.names() if known else ()) if name not in used]
    return tuple(found)


def baseline_entries(cases: Iterable[Case]) -> frozenset[Name]:
    """The entries of baselines that checks of these cases compare with: ids of the case, and names of the entry."""
    return frozenset((case.id, r.key) for case in cases for r in requested(case.checks, BaselineRequest))


def rules_of(case: Case) -> dict[str, Any]:
    """The rules of a case that its ratio depends on, as JSON values by flat names, without the search budget."""
    inputs = case.inputs
    shapes = [
        {name: [list(shape.min), list(shape.opt), list(shape.max)] for name, shape in profile.shapes.items()}
        for profile in inputs.profiles
    ]
    return {
        **{f"quantize.{rule}": getattr(case.quantize, rule) for rule in _QUANTIZE},
        **{
            f"patterns.{field.name}": sorted(getattr(case.patterns, field.name))
            for field in fields(case.patterns)
        },
        "inputs.shapes": shapes,
        "inputs.weights": [profile.weight for profile in inputs.profiles],
        "inputs.batch": inputs.batch,
        "inputs.values": [f"{name} {value}" for name, value in sorted(inputs.values.items())],
        "tune.min_sqnr_db": case.tune.limits.min_sqnr_db,
        "tune.accuracy": None if (rules := case.tune.accuracy) is None else asdict(rules),
    }


def _value_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "empty"
    return "unset" if value is None else str(value)


def figures_elsewhere(file: Path, name: Name) -> tuple[BaselineFigure, ...]:
    """The figures of the same check on other devices, from the files beside this one, sorted."""
    found = []
    for other in sorted(set(file.parent.glob("*.json")) - {file}):
        with suppress(StateError):  # reported in a run on that device
            known = read_baseline(other)
            if known is not None and (entry := known.entry(name)) is not None:
                found.append(entry.figures(known.device)[-1])
    return tuple(found)
