"""Addresses of schedulers: encryption beyond this machine, and certificates that authenticate both sides."""

from __future__ import annotations

import ssl

import pytest

from qdqspec.app.cluster.address import Address
from qdqspec.errors import ConfigError, OutputError


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("127.0.0.1", "tcp://127.0.0.1:8786"),
        ("[::1]:99", "tcp://[::1]:99"),
        ("10.0.0.5", "tls://10.0.0.5:8786"),
        ("gpu-farm:99", "tls://gpu-farm:99"),
        ("tls://127.0.0.1:99", "tls://127.0.0.1:99"),
    ],
)
def test_addresses_beyond_this_machine_are_encrypted(text, full):
    assert str(Address.parse(text)) == full


@pytest.mark.parametrize("text", ["tcp://10.0.0.5:8786", "tcp://gpu-farm"])
def test_plain_tcp_is_refused_beyond_this_machine(text):
    with pytest.raises(ConfigError, match="plain tcp is refused") as error:
        Address.parse(text)
    assert "qdqspec cluster certificates" in error.value.cure


@pytest.mark.parametrize("text", ["", "http://a", "tls://", "a:b", "tls://a:1/path"])
def test_wrong_addresses_are_refused(text):
    with pytest.raises(ConfigError, match="not an address"):
        Address.parse(text)


def test_tls_needs_certificates(tmp_path):
    with pytest.raises(ConfigError, match=r"missing: ca\.pem, cluster\.pem, cluster\.key") as error:
        Address.parse("10.0.0.5").security(tmp_path)
    assert error.value.cure.startswith("copy the three files of the cluster to this folder")


@pytest.mark.parametrize(("text", "needs_files"), [("127.0.0.1", False), ("10.0.0.5", True)])
def test_the_error_for_an_unreachable_scheduler_names_the_certificates(text, needs_files):
    error = Address.parse(text).unanswered(OSError("TLS certificate does not match"))
    assert "TLS certificate does not match" in error.what
    assert ("the same ca.pem, cluster.pem and cluster.key" in error.cure) == needs_files


@pytest.fixture
def make():
    pytest.importorskip("cryptography", reason="the extra [cluster] is not installed")
    from qdqspec.app.cluster.address import make_certificates

    return make_certificates


def test_certificates_authenticate_both_sides_and_those_of_another_authority_do_not(make, tmp_path):
    folder = tmp_path / "own"
    make(folder, days=10)
    assert _handshake(folder, folder)
    assert not [path for path in folder.iterdir() if path.stat().st_mode & 0o077 and path.suffix == ".key"]
    make(tmp_path / "other", days=10)
    with pytest.raises(ssl.SSLCertVerificationError):
        _handshake(tmp_path / "own", tmp_path / "other")


def test_certificates_are_not_overwritten_and_a_key_that_others_may_read_is_refused(make, tmp_path):
    make(tmp_path, days=10)
    with pytest.raises(OutputError, match="exists already"):
        make(tmp_path, days=10)
    (tmp_path / "cluster.key").chmod(0o644)
    with pytest.raises(ConfigError, match="private key"):
        Address.parse("10.0.0.5").security(tmp_path)


def _handshake(server, client) -> bool:
    """A mutual handshake in memory with the TLS contexts of Dask: certificates are required on both sides."""
    contexts = []
    for folder, purpose in ((server, ssl.Purpose.CLIENT_AUTH), (client, ssl.Purpose.SERVER_AUTH)):
        context = ssl.create_default_context(purpose, cafile=str(folder / "ca.pem"))
        context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
        context.load_cert_chain(folder / "cluster.pem", folder / "cluster.key")
        contexts.append(context)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        contexts[0].wrap_bio(to_server, to_client, server_side=True),
        contexts[1].wrap_bio(to_client, to_server),
    ]
    for _ in range(4):
        for side in reversed(sides):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return all(side.getpeercert() for side in sides)
