"""Addresses of schedulers, and the encryption that they require."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from qdqspec.errors import ConfigError

if TYPE_CHECKING:
    from distributed import Security

PORT = 8786
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cluster.pem", "cluster.key"
_MAKE = "make them with: qdqspec cluster certificates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address of a scheduler. ``tls`` is whether connections are encrypted and mutually authenticated."""

    host: str
    port: int
    tls: bool

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address of ``HOST``, ``HOST:PORT``, ``tls://HOST:PORT`` or ``tcp://HOST:PORT``.

        Without a scheme it is tcp on this machine (loopback) and tls elsewhere. Raises `ConfigError` for tcp to
        another machine: any program that reaches an unencrypted port can run code there.
        """
        scheme, _, rest = text.rpartition("://")
        try:
            parts = urlsplit(f"//{rest}")
            host, port = parts.hostname or "", PORT if parts.port is None else parts.port
        except ValueError:
            host, port, scheme = "", 0, scheme
        if not host or scheme not in ("", "tcp", "tls") or parts.path or parts.query:
            raise ConfigError(f"'{text}' is not an address", cure="write it as tls://HOST:8786")
        loopback = is_loopback(host)
        if scheme == "tcp" and not loopback:
            raise ConfigError(
                f"{text}: plain tcp is refused beyond this machine: anyone who reaches the port could run code",
                cure=f"use tls://{rest}; {_MAKE}",
            )
        return cls(host=host, port=port, tls=scheme == "tls" or (not scheme and not loopback))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.tls else 'tcp'}://{host}:{self.port}"

    def unanswered(self, error: Exception) -> ConfigError:
        """The error of a client or worker that does not reach the scheduler."""
        files = f"; all machines need the same {AUTHORITY}, {CERTIFICATE} and {KEY}" if self.tls else ""
        return ConfigError(
            f"no scheduler answers at {self}: {error}", cure=f"start one with: qdqspec cluster start{files}"
        )

    def security(self, folder: Path) -> Security | None:
        """The certificates in ``folder`` for tls; ``None`` for tcp. Raises `ConfigError` if one is missing."""
        if not self.tls:
            return None
        missing = [name for name in (AUTHORITY, CERTIFICATE, KEY) if not (folder / name).is_file()]
        if missing:
            raise ConfigError(
                f"{self} needs certificates; missing: {', '.join(missing)}",
                where=folder,
                cure="copy the three files of the cluster to this folder, or make them once for all machines "
                "with: qdqspec cluster certificates",
            )
        if os.name == "posix" and (folder / KEY).stat().st_mode & 0o077:
            raise ConfigError(
                "other users may read the private key of the cluster",
                where=folder / KEY,
                cure=f"run: chmod 600 {folder / KEY}",
            )
        from distributed import Security

        files = {"ca_file": folder / AUTHORITY, "cert": folder / CERTIFICATE, "key": folder / KEY}
        own = {
            f"tls_{role}_{what}": str(files[what])
            for role in ("client", "scheduler", "worker")
            for what in ("cert", "key")
        }
        return Security(tls_ca_file=str(files["ca_file"]), require_encryption=True, **own)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, reached without a network."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_distributed() -> None:
    """Raise `ConfigError` if the extra is not installed. Dask then logs warnings and errors only."""
    from importlib.util import find_spec

    if find_spec("distributed") is None:
        raise ConfigError(
            "clusters need Dask distributed, which is not installed",
            cure='install it with: pip install "qdqspec[cluster]"',
        )
    # Read at its import, also by its child processes.
    os.environ.setdefault("DASK_LOGGING__DISTRIBUTED", "warning")
