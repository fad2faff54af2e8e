"""The content store of a worker's machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import onnx
import pytest
from chains import chain_model
from packaging.version import Version

from qdqspec.app.cluster.content import ContentStore, write_chunk


def put(store: ContentStore, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    with store.receiving():
        partial = store.partial()
        partial.write_bytes(content)
        assert store.take(partial, digest)
    return digest


def test_a_file_is_in_the_store_after_its_verification(tmp_path):
    store = ContentStore(tmp_path)
    digest = put(store, b"model")
    assert store.has(digest)
    assert store.path(digest).read_bytes() == b"model"


def test_content_with_another_digest_is_removed(tmp_path):
    store = ContentStore(tmp_path)
    digest = hashlib.sha256(b"model").hexdigest()
    with store.receiving():
        partial = store.partial()
        partial.write_bytes(b"another")
        assert not store.take(partial, digest)
    assert not store.has(digest)
    assert not partial.exists()


@pytest.mark.parametrize("digest", ["../../etc/passwd", "A" * 64, "0" * 63, ""])
def test_a_name_that_is_not_a_digest_is_refused(tmp_path, digest):
    with pytest.raises(ValueError, match="not a SHA-256"):
        ContentStore(tmp_path).path(digest)


def test_the_least_recently_used_files_are_evicted_first(tmp_path):
    now = [1000.0]
    store = ContentStore(tmp_path, clock=lambda: now[0])
    digests = []
    for number in range(3):
        now[0] += 10
        digests.append(put(store, bytes([number]) * 100))
        store.has(digests[-1])
    now[0] += 10
    store.has(digests[0])  # used again
    assert store.evict(most_bytes=250) == 1
    assert [store.has(digest) for digest in digests] == [True, False, True]
    now[0] += 1e6
    assert store.evict(most_seconds=1e5) == 2


def test_the_files_of_a_job_remain_after_eviction(tmp_path):
    store = ContentStore(tmp_path / "store")
    digest = put(store, b"model")
    store.place(digest, tmp_path / "job" / "model.onnx")
    assert store.evict(most_bytes=0) == 1
    assert (tmp_path / "job" / "model.onnx").read_bytes() == b"model"


def test_external_data_is_a_copy_and_not_a_hard_link(tmp_path):
    """Versions of onnx above 1.20 refuse external data that has several hard links."""
    onnx.save(
        chain_model(), tmp_path / "chain.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
    )
    store, digests = ContentStore(tmp_path / "store"), {}
    for name in ("chain.onnx", "w.bin"):
        digests[name] = put(store, (tmp_path / name).read_bytes())
        store.place(digests[name], tmp_path / "linked" / name)
        store.place(digests[name], tmp_path / "job" / name, linked=name != "w.bin")
    if Version(onnx.__version__) >= Version("1.22"):
        with pytest.raises(onnx.checker.ValidationError, match="hard links"):
            onnx.load(tmp_path / "linked" / "chain.onnx")
    assert onnx.load(tmp_path / "job" / "chain.onnx").graph.initializer[0].raw_data


def test_concurrent_first_chunks_are_all_kept(tmp_path, monkeypatch):
    """A chunk that finds no file must not truncate one that another chunk has created meanwhile."""
    monkeypatch.setattr(Path, "exists", lambda self: False)  # as each of them finds it
    write_chunk(tmp_path / "file", 4, b"last")
    write_chunk(tmp_path / "file", 0, b"data")
    assert (tmp_path / "file").read_bytes() == b"datalast"
