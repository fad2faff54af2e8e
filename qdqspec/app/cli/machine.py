"""Commands about this machine: ``doctor``, ``config``, its ``cache``, and its part in a ``cluster`` as a ``worker``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdqspec._core import registry
from qdqspec._core.config import BUILD_OPTIONS, OPTIONS, list_settings
from qdqspec._core.options import duration, options_of
from qdqspec._core.records import to_data
from qdqspec._core.registry import DEFAULT_BACKEND
from qdqspec._core.units import count_text, seconds_text, size_text, without_passwords
from qdqspec.app.cli.command import (
    FINE,
    IMPOSSIBLE,
    WANTING,
    answer,
    argument,
    complain,
    end_on_sigterm,
    note,
    refuse_options,
    settings_from,
    verb,
)
from qdqspec.errors import ConfigError

if TYPE_CHECKING:
    from qdqspec._core.store import Store
    from qdqspec.app.cluster.worker import Announcement

_MONTH = 30 * 86400.0  # seconds
_PORT = 8786


@verb(
    "doctor",
    f"qdqspec doctor --backend {DEFAULT_BACKEND}",
    options=("backend", "device", "backend-option", "plugin"),
)
def doctor(arguments: argparse.Namespace) -> int:
    """List which backends work here, and how to get the others. Exits 0 when the chosen one works."""
    from qdqspec.backends import BuildOptions, backend_named

    settings = settings_from(arguments)
    chosen, options = settings.backend, BuildOptions.of(settings)
    options_of(chosen).read(options.extra)  # refuses a library that is no file
    found = {name: backend_named(name).probe(options) for name in registry.names("backend")}
    lines = []
    for name in sorted(found, key=lambda name: (name != chosen, not found[name].usable)):
        here = found[name]
        state = "works" if here.usable else "not usable here"
        lines.append(f"{name}: {state}{' (chosen)' if name == chosen else ''}")
        lines += [f"  {here.why}"] if here.why else []
        lines += [f"  to get it: {here.install}"] if here.install and not here.usable else []
        width = max(map(len, here.facts), default=0)
        lines += [f"  {fact:<{width}}  {value}" for fact, value in here.facts.items()]
    where = {True: "anywhere", False: "command line only"}
    options_by_backend: dict[str, list[dict[str, Any]]] = {
        name: [
            {
                "name": f"{name}.{option.name}",
                "expects": option.type.expects,
                "default": option.shown,
                "in_files": option.in_files,
                "help": option.help,
            }
            for option in options_of(name).options
        ]
        for name in found
    }
    rows = [
        (own["name"], own["expects"], own["default"] or "-", where[own["in_files"]])
        for own in options_by_backend[chosen]
    ]
    if rows:
        lines += ["", f"options of {chosen} (--backend-option NAME=VALUE):"]
        lines.append(_table(("option", "expects", "default", "set"), rows))
    backends = {name: {**to_data(found[name]), "options": own} for name, own in options_by_backend.items()}
    code = FINE if found[chosen].usable else IMPOSSIBLE
    return answer(arguments, {"chosen": chosen, "backends": backends}, "\n".join(lines), code=code)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; it loads no library, as `config` loads none."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, ["-" * width for width in widths], *rows)
    )


@verb(
    "config",
    "QDQSPEC_THREADS=4 qdqspec config",
    options=[option.name for option in OPTIONS if option.name != "json"],  # --json is the command's own
)
def config(arguments: argparse.Namespace) -> int:
    """Print every setting with its value and where it came from."""
    settings = settings_from(arguments)
    listed, texts = [], []
    for name, given, origin in list_settings(settings):
        value: Any = given
        if isinstance(value, tuple):
            value = [without_passwords(str(one)) for one in value]
            text = ", ".join(value)
        elif value is None or isinstance(value, bool | int | float):
            text = "" if value is None else str(value).lower()
        else:
            text = value = without_passwords(str(value))
        listed.append({"name": name, "value": value, "origin": origin})
        texts.append((name, text or "-", origin))
    text = f"root: {settings.root}\n\n{_table(('setting', 'value', 'set by'), texts)}"
    return answer(arguments, {"root": str(settings.root), "settings": listed}, text)


# ---- finished searches ---------------------------------------------------------------------------


def _age(text: str) -> float:
    try:
        return duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


@verb(
    "cache",
    "qdqspec cache prune --older-than 30d",
    argument(
        "action",
        text="list: every entry (default); info: number, size and age; prune: remove old ones; clear: remove all; "
        "export, import: write all intact entries to FILE, or add those of FILE.",
        nargs="?",
        default="list",
        choices=("list", "info", "prune", "clear", "export", "import"),
    ),
    argument("file", "FILE", "A .zip archive, for export and import.", nargs="?", type=Path),
    argument(
        "--older-than",
        "TIME",
        "Smallest age of entries that prune removes, such as 12h or 30d (default: 30d).",
        type=_age,
    ),
    options=("cache-dir",),
)
def cache(arguments: argparse.Namespace) -> int:
    """List, prune, clear, export or import cached searches. Exits 1 where an entry is damaged."""
    from qdqspec._core.store import Store

    store = Store(settings_from(arguments).cache_dir)
    if (arguments.file is None) is (arguments.action in ("export", "import")):
        raise ConfigError(f"cache {arguments.action}: FILE is for export and import, which need it")
    if arguments.action != "prune":
        refuse_options(arguments, "older-than", "prune")
    if arguments.action == "list":
        return _list_cache(arguments, store)
    found: dict[str, Any] = {"folder": str(store.folder)}
    if arguments.file is not None:
        found["file"] = str(arguments.file)
    if arguments.action == "info":
        entries = store.entries()
        size = sum(each.size_bytes for each in entries)
        age = max((each.age_seconds for each in entries), default=0.0)
        found |= {"entries": len(entries), "bytes": size, "oldest_seconds": round(age, 1)}
        text = f"{_searches_text(len(entries))}, {size_text(size)}, the oldest {seconds_text(age)}"
    elif arguments.action == "export":
        found["exported"] = store.export(arguments.file)
        text = f"{_searches_text(found['exported'])} written to {arguments.file}"
    elif arguments.action == "import":
        found["added"], found["present"] = store.take(arguments.file)
        text = f"{_searches_text(found['added'])} added, {found['present']} were there"
    else:
        month = _MONTH if arguments.older_than is None else arguments.older_than
        found["removed"] = store.prune(month if arguments.action == "prune" else 0.0)
        text = f"{count_text(found['removed'], 'entry', 'entries')} removed"
    return answer(arguments, found, f"{store.folder}: {text}")


def _list_cache(arguments: argparse.Namespace, store: Store) -> int:
    from qdqspec.app.preparation.stored import NODES, about

    entries = store.entries()
    size = sum(entry.size_bytes for entry in entries)
    lines = [f"{store.folder}: {_searches_text(len(entries))}, {size_text(size)}"]
    rows: list[dict[str, Any]] = []
    for entry in entries:
        row = {
            "key": entry.folder.name,
            "folder": str(entry.folder),
            "bytes": entry.size_bytes,
            "age_seconds": round(entry.age_seconds, 1),
            "damage": entry.damage,
            **{name: text for name, text in about(entry.folder).items() if name != NODES},
        }
        rows.append(row)
        what = " on ".join(str(row[word]) for word in ("case", "device") if word in row) or "(not stated)"
        age = seconds_text(entry.age_seconds)
        lines.append(f"  {entry.folder.name[:12]}  {size_text(entry.size_bytes):>9}  {age:>9}  {what}")
    found = {"folder": str(store.folder), "size_bytes": size, "entries": rows}
    answer(arguments, found, "\n".join(lines))
    damaged = [entry for entry in entries if entry.damage]
    for entry in damaged:
        complain(
            f"{entry.folder}: {entry.damage}\n  it is ignored and made anew; qdqspec cache clear removes it"
        )
    return WANTING if damaged else FINE


def _searches_text(number: int) -> str:
    return count_text(number, "finished search", "finished searches")


# ---- clusters ------------------------------------------------------------------------------------


@verb(
    "cluster",
    "qdqspec cluster start --host 10.0.0.5",
    argument(
        "action",
        text="start: run the scheduler and print its address; list: the devices of the workers at ADDRESS; "
        "certificates: make the certificates for tls, in the folder of --cluster-tls.",
        choices=("start", "list", "certificates"),
    ),
    argument("address", "ADDRESS", "The scheduler, for list.", nargs="?"),
    argument(
        "--host",
        text="Address on which start listens (default: 127.0.0.1, this machine only).",
        default="127.0.0.1",
    ),
    argument("--port", "N", f"Port of start (default: {_PORT}).", type=int, default=_PORT),
    argument("--days", "N", "Validity of certificates in days (default: 365).", type=int, default=365),
    options=("cluster-tls",),
)
def cluster(arguments: argparse.Namespace) -> int:
    """Run a scheduler, list its workers, or make certificates."""
    from qdqspec.app.cluster.address import Address, make_certificates, require_distributed

    certificates = settings_from(arguments).cluster_tls
    require_distributed()
    if arguments.action == "certificates":
        files = [str(path) for path in make_certificates(certificates, arguments.days)]
        note(
            "copy these files to each machine of the cluster; the key gives the right to run code on all of them"
        )
        return answer(arguments, {"files": files, "days": arguments.days}, "\n".join(files))
    if arguments.action == "list":
        from qdqspec.app.cluster.client import Cluster

        if arguments.address is None:
            raise ConfigError("list needs the address of the scheduler", cure="qdqspec cluster list ADDRESS")
        address = Address.parse(arguments.address)
        with closing(Cluster(address, certificates)) as connection:
            workers = connection.workers()
        lines = [f"{address}: {count_text(len(workers), 'worker')}"]
        for each in workers:
            silent = f", silent for {each.silent_seconds:.0f} s" if each.silent_seconds > 10 else ""
            free = f"{size_text(each.free_bytes)} free{silent}"
            lines.append(f"{each.host} ({each.system}, qdqspec {each.version}, {free})")
            lines += [f"  {device.backend}: {device.key}" for device in each.devices]
        found = {"address": str(address), "workers": to_data(workers)}
        return answer(arguments, found, "\n".join(lines))
    from qdqspec.app.cluster.worker import run_scheduler

    host = f"[{arguments.host}]" if ":" in arguments.host.removeprefix("tls://") else arguments.host
    address = Address.parse(f"{host}:{arguments.port}")
    end_on_sigterm()
    run_scheduler(address, certificates, lambda at: answer_started(arguments, at))
    return FINE


def answer_started(arguments: argparse.Namespace, address: str) -> None:
    """Print the address of a scheduler that runs."""
    add = f"qdqspec worker {address}"
    answer(arguments, {"address": address, "add_devices_with": add}, address)
    if not arguments.json:
        complain(f"The scheduler runs. Add devices with: {add}")


@verb(
    "worker",
    "qdqspec worker tls://10.0.0.5:8786",
    argument("address", "ADDRESS", "The scheduler, as `qdqspec cluster start` printed it."),
    argument(
        "--backend",
        text="Offer only this backend. Repeatable (default: all that are usable).",
        action="append",
        choices=registry.names("backend"),
    ),
    argument(
        "--folder",
        "DIR",
        "Folder of received models and running cases (default: .qdqspec/worker); workers of a machine may share it.",
        type=Path,
    ),
    options=("cluster-tls", "device", *BUILD_OPTIONS),
)
def worker(arguments: argparse.Namespace) -> int:
    """Offer this machine's devices to a cluster until interrupted."""
    from qdqspec.app.cluster.address import Address, require_distributed

    require_distributed()
    from qdqspec.app.cluster.worker import run_worker

    settings = settings_from(arguments)
    folder = (arguments.folder or settings.root / ".qdqspec" / "worker").absolute()

    def ready(found: Announcement) -> None:
        lines = [f"{found.host} offers:", *(f"  {device.backend}: {device.key}" for device in found.devices)]
        answer(arguments, to_data(found), "\n".join(lines))

    end_on_sigterm()
    address, backends = Address.parse(arguments.address), tuple(arguments.backend or ())
    run_worker(address, settings.cluster_tls, settings, folder, backends, ready)
    return FINE
