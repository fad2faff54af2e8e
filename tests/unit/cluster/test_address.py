"""Addresses of schedulers: encryption beyond this machine, and certificates that authenticate both sides."""

from __future__ import annotations

import pytest

from qdqspec.app.cluster.address import Address, make_certificates
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "plain tcp is refused") for text in ("tcp://10.0.0.5:8786", "tcp://gpu-farm")),
        *((text, "not an address") for text in ("", "http://a", "tls://", "a:b", "tls://a:1/path")),
    ],
)
def test_plain_tcp_beyond_this_machine_and_wrong_addresses_are_refused(text, message):
    with pytest.raises(ConfigError, match=message) as error:
        Address.parse(text)
    assert ("qdqspec cluster certificates" in error.value.cure) is ("tcp" in message)


def test_tls_needs_certificates(tmp_path):
    with pytest.raises(ConfigError, match=r"missing: ca\.pem, cluster\.pem, cluster\.key") as error:
        Address.parse("10.0.0.5").security(tmp_path)
    assert error.value.cure.startswith("copy the three files of the cluster to this folder")


@pytest.mark.parametrize(("text", "needs_files"), [("127.0.0.1", False), ("10.0.0.5", True)])
def test_the_error_for_an_unreachable_scheduler_names_the_certificates(text, needs_files):
    error = Address.parse(text).unanswered(OSError("TLS certificate does not match"))
    assert "TLS certificate does not match" in error.what
    assert ("the same ca.pem, cluster.pem and cluster.key" in error.cure) == needs_files


def test_certificates_are_not_overwritten_and_a_key_that_others_may_read_is_refused(tmp_path):
    """Connections with certificates are tested on a network address."""
    pytest.importorskip("distributed", reason="the extra [cluster] is not installed")
    make_certificates(tmp_path, days=10)
    assert Address.parse("10.0.0.5").security(tmp_path).require_encryption
    with pytest.raises(OutputError, match="exists already"):
        make_certificates(tmp_path, days=10)
    (tmp_path / "cluster.key").chmod(0o644)
    with pytest.raises(ConfigError, match="private key"):
        Address.parse("10.0.0.5").security(tmp_path)
