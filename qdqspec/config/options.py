"""The table of options.

Each is ``--qdq-x-y`` of pytest, ``--x-y`` of the command line, ``QDQSPEC_X_Y`` and a key of
``[tool.qdqspec]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from qdqspec.config import values
from qdqspec.config.settings import BASELINE_POLICIES, DEFAULT_BACKEND, MODES, REQUIREMENTS, UPDATES

ENVIRONMENT_PREFIX = "QDQSPEC_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. ``parse`` converts its text, or raises ``ValueError`` stating what is valid.

    ``kind`` is ``one`` value, ``many`` (repeatable) or a ``switch``. ``sets`` is the option of a backend,
    ``BACKEND.WORD``, that the value is given to: `Settings` has it in ``backend_option``.
    """

    name: str  # with dashes
    parse: Callable[[object], Any]
    help: str
    metavar: str = ""
    kind: Literal["one", "many", "switch"] = "one"
    sets: str = ""

    @property
    def key(self) -> str:
        """The field of `Settings`, and the key in TOML."""
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.key.upper()


OPTIONS: tuple[Option, ...] = (
    Option(
        name="backend",
        parse=values.backend,
        metavar="NAME",
        help=f"Inference backend (default: {DEFAULT_BACKEND}).",
    ),
    Option(
        name="mode",
        parse=values.one_of(MODES),
        metavar="MODE",
        help="run: use the cached winner, or tune where there is none; measure: time the known winner anew; "
        "verify: only what needs no timing; plan: list candidates and cost, build nothing (default: run).",
    ),
    Option(
        name="cache-dir",
        parse=values.path,
        metavar="DIR",
        help="What was measured (default: .qdqspec/cache).",
    ),
    Option(name="no-cache", parse=values.switch, kind="switch", help="Neither read nor write the cache."),
    Option(
        name="retune",
        parse=values.switch,
        kind="switch",
        help="Search again although a winner is cached, and replace it.",
    ),
    Option(
        name="seed", parse=values.whole(0), metavar="N", help="Seed of search and random inputs (default: 0)."
    ),
    Option(
        name="threads", parse=values.whole(1), metavar="N", help="Threads a model runs with (default: 1)."
    ),
    Option(
        name="jobs",
        parse=values.whole(1),
        metavar="N",
        help="Builds that wait for no measurement are made N at a time, on backends that time no kernels (default: 1).",
    ),
    Option(
        name="device",
        parse=values.whole(0),
        metavar="N",
        help="Index of the GPU, for backends that use one; as CUDA counts them (default: 0).",
    ),
    Option(
        name="time-limit",
        parse=values.duration,
        metavar="TIME",
        help="Time for the whole run, such as 20m; what is not decided by then is inconclusive.",
    ),
    Option(
        name="build-limit",
        parse=values.duration,
        metavar="TIME",
        help="Time for each build of a model, such as 30m; one that takes longer is a failed trial (default: 10m).",
    ),
    Option(
        name="require",
        parse=values.one_of(REQUIREMENTS),
        metavar="WHAT",
        kind="many",
        help="device: a missing backend fails instead of skipping; conclusive: so does an undecided "
        "measurement. Repeatable.",
    ),
    Option(name="scheme", parse=values.word, metavar="DIGEST", help="Judge this known placement; no search."),
    Option(name="output", parse=values.path, metavar="DIR", help="Models and results (default: reports)."),
    Option(
        name="report",
        parse=values.path,
        metavar="PATH",
        kind="many",
        help="Write a report; the suffix chooses the format. Repeatable.",
    ),
    Option(name="json", parse=values.path, metavar="PATH", help="Write the run record as JSON."),
    Option(
        name="allow-path",
        parse=values.path,
        metavar="DIR",
        kind="many",
        help="A folder outside the root that specs may name files in. Repeatable.",
    ),
    Option(
        name="baseline",
        parse=values.one_of(BASELINE_POLICIES),
        metavar="POLICY",
        help="Where a regression check has no baseline to compare with: require fails, warn skips; off "
        "compares nothing (default: require in CI, warn elsewhere).",
    ),
    Option(
        name="update",
        parse=values.one_of(UPDATES),
        metavar="WHICH",
        help="Write baselines. new: those that are missing; changed: also those that no longer hold; all: "
        "every one of the checks selected. Commit them.",
    ),
    Option(
        name="backend-option",
        parse=values.backend_option,
        metavar="BACKEND.WORD=VALUE",
        kind="many",
        help="How a backend builds and measures: an option that doctor lists for it. Repeatable.",
    ),
    Option(
        name="plugin",
        parse=values.path,
        metavar="LIB.so",
        kind="many",
        help="A library of custom operators or plugins of the backend. On the command line only. Repeatable.",
    ),
    Option(
        name="trtexec-args",
        sets="trtexec.args",
        parse=values.word,
        metavar="ARGS",
        help="More arguments for trtexec, quoted as one. On the command line only.",
    ),
    Option(
        name="cluster",
        parse=values.word,
        metavar="ADDRESS",
        help="Run each case on a worker of the scheduler at this address, such as tls://10.0.0.5:8786.",
    ),
    Option(
        name="cluster-device",
        parse=values.word,
        metavar="KEY",
        help="Device key of the workers to use, if they have several for the backend; qdqspec cluster list shows them.",
    ),
    Option(
        name="cluster-tls",
        parse=values.path,
        metavar="DIR",
        help="Certificates of the cluster (default: .qdqspec/cluster).",
    ),
    Option(name="update-in-ci", parse=values.switch, kind="switch", help="Allow --qdq-update in CI."),
)
BY_KEY = {option.key: option for option in OPTIONS}
# No file or variable may set these: they load native code, or name a scheduler, which can run code on its clients.
COMMAND_LINE = frozenset(
    {*(option.key for option in OPTIONS if option.sets), "plugin", "cluster", "cluster_tls"}
)
# How the backend builds, for each command that builds.
BUILD_OPTIONS = ("backend-option", "plugin", *(option.name for option in OPTIONS if option.sets))


def add_options(
    add: Callable[..., Any], *, prefix: str, only: Iterable[str] | None = None, skip: Iterable[str] = ()
) -> None:
    """Add the options to a parser through its ``add_argument`` or ``addoption``; ``dest`` is ``qdq_<key>``."""
    chosen = {option.name for option in OPTIONS} if only is None else set(only)
    for option in OPTIONS:
        if option.name not in chosen - set(skip):
            continue
        words: dict[str, Any] = {"dest": f"qdq_{option.key}", "default": None, "help": option.help}
        if option.kind == "switch":
            words["action"] = "store_true"
        else:
            words["metavar"] = option.metavar
            if option.kind == "many":
                words["action"] = "append"
        add(f"{prefix}{option.name}", **words)


def flags_given(values: Mapping[str, object]) -> dict[str, object]:
    """The options given on a command line, by key, from a namespace's values."""
    given = {option.key: values.get(f"qdq_{option.key}") for option in OPTIONS}
    return {key: value for key, value in given.items() if value is not None}
