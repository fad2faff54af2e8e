"""Addresses of schedulers, and the certificates that encryption requires.

Scheduler, workers and clients authenticate each other by a certificate that the cluster's own authority signed (mutual
TLS). The authority's private key is not kept: another certificate cannot be added later, and all are replaced together.
"""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from qdqspec._core.files import explained, replace_file
from qdqspec.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from distributed import Security


PORT = 8786
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "cluster.pem", "cluster.key"
# Of a key (RFC 5280, 4.2.1.3). Python 3.13 and later require them of an authority.
_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)
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

        own = {
            f"tls_{role}_{what}": str(folder / file)
            for role in ("client", "scheduler", "worker")
            for what, file in (("cert", CERTIFICATE), ("key", KEY))
        }
        return Security(tls_ca_file=str(folder / AUTHORITY), require_encryption=True, **own)


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


def make_certificates(folder: Path, days: int) -> tuple[Path, ...]:
    """Write the authority's certificate, the cluster's and its private key; returns their paths.

    Raises `OutputError` if one of them exists: replacing it would exclude running machines.
    """
    paths = (folder / AUTHORITY, folder / CERTIFICATE, folder / KEY)
    for path in paths:
        if path.exists():
            cure = "remove it, or name another folder"
            raise OutputError("this file exists already", where=path, cure=cure)
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate("qdqspec cluster authority", authority_key, authority_key, days)
    certificate = _certificate("qdqspec cluster", key, authority_key, days, issuer=authority)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = serialization.Encoding.PEM
    with explained("the certificates", folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # only its owner may read it, from the first byte
        with os.fdopen(os.open(paths[2], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(private)
        for path, made in zip(paths, (authority, certificate), strict=False):
            replace_file(path, made.public_bytes(pem))
        replace_file(folder / ".gitignore", "*\n")
    return paths


def _certificate(
    name: str,
    key: EllipticCurvePrivateKey,
    signer: EllipticCurvePrivateKey,
    days: int,
    issuer: x509.Certificate | None = None,
) -> x509.Certificate:
    """A certificate signed by ``signer``; an authority's own if there is no ``issuer``."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    used = ("key_cert_sign", "crl_sign") if issuer is None else ("digital_signature",)
    usage = {use: use in used for use in _USES}
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(own)
        .issuer_name(own if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks of machines differ
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
