"""Makes the certificates of a cluster: an authority, and one certificate that all its machines use.

Scheduler, workers and clients authenticate each other by a certificate that the authority signed (mutual TLS). The
authority's private key is not kept: another certificate cannot be added later, and all are replaced together.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from qdqspec.cluster.address import AUTHORITY, CERTIFICATE, KEY
from qdqspec.errors import OutputError
from qdqspec.files import explained, replace_file

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey


def make_certificates(folder: Path, days: int) -> tuple[Path, ...]:
    """Write the authority's certificate, the cluster's and its private key; returns their paths.

    Raises `OutputError` if one of them exists: replacing it would exclude running machines.
    """
    paths = (folder / AUTHORITY, folder / CERTIFICATE, folder / KEY)
    for path in paths:
        if path.exists():
            raise OutputError(
                "this file exists already", where=path, cure="remove it, or name another folder"
            )
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
        _write_private(paths[2], private)
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
        .add_extension(_usage(is_authority=issuer is None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    """What a key may be used for (RFC 5280, 4.2.1.3). Python 3.13 and later require it of an authority."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        encipher_only=False,
        decipher_only=False,
    )


def _write_private(path: Path, content: bytes) -> None:
    """Create a file that only its owner may read, from the first byte."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
