"""Addresses of schedulers with their certificates, and a case as a request in the folder of a job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Event

import numpy as np
import onnx
import pytest
from chains import SHAPE, chain_model

from qdqspec import __version__
from qdqspec._core.config import Settings
from qdqspec.app.cases import load_cases
from qdqspec.app.cluster.address import Address, make_certificates
from qdqspec.app.cluster.client import Cluster
from qdqspec.app.cluster.request import in_job, pack, unpack
from qdqspec.app.cluster.worker import Device, WorkerInfo
from qdqspec.errors import BackendUnavailableError, ConfigError, DataError, OutputError
from qdqspec.types import Case, Data, Inputs


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


def test_a_device_is_chosen_among_workers_of_this_version(monkeypatch):
    """Results of two devices are never mixed: a worker gets the cases of its own devices only."""

    def worker(key, version=__version__, backend="fake"):
        device = Device(backend=backend, target=backend, key=key)
        facts = {"python": "3.11", "host": "h", "system": "s", "address": key, "free_bytes": 1}
        return WorkerInfo(version=version, devices=(device,), silent_seconds=0.0, **facts)

    workers = [worker("one"), worker("two"), worker("old", "0.0.1", "onnxruntime")]
    monkeypatch.setattr(Cluster, "workers", lambda _: tuple(workers))
    cluster = Cluster.__new__(Cluster)  # without a scheduler
    cluster.address, cluster._closing = Address.parse("127.0.0.1"), Event()
    with pytest.raises(ConfigError, match="has several devices") as several:
        cluster.device("fake")
    assert "one, two" in several.value.cure
    assert cluster._workers_with(cluster.device("fake", "two")) == ["two"]
    with pytest.raises(BackendUnavailableError, match="no worker") as outdated:
        cluster.device("onnxruntime")
    assert "with qdqspec 0.0.1, which differs" in outdated.value.cure


SPEC = """\
qdqspec: 1
model: chain.onnx
inputs: {calibration: data.npz, evaluation: data.npz}
quantize: {calibration: entropy}
tune: {preset: quick, min_sqnr_db: 25, accuracy: {metric: top1, max_drop: 1%}}
checks:
  - {kind: accuracy, metric: top1, min: 0.97, max_drop: 1%}
  - {kind: speedup, min: 1.05}
  - {kind: latency, max_ms: 3.5}
  - {kind: parity, min_sqnr_db: 25, search: {}}
  - {kind: regression}
  - {kind: placement, require: ["Conv"]}
  - {kind: survival, through: [onnxruntime-all]}
  - {kind: lint, target: onnxruntime-cpu}
  - {kind: size, max_ratio: 0.9}
"""


@pytest.fixture
def case(tmp_path) -> Case:
    onnx.save(chain_model(), tmp_path / "chain.onnx")
    np.savez(tmp_path / "data.npz", x=np.zeros(SHAPE, np.float32), labels=np.zeros(1, np.int64))
    spec = tmp_path / "chain.qdq.yaml"
    spec.write_text(SPEC)
    return load_cases(spec, Settings(root=tmp_path))[0]


def arrived(given: Case, own: Settings, folder: Path) -> tuple[Case, Settings]:
    sent = json.dumps(pack(given, own, own.root / "out")[0])
    return unpack(json.loads(sent), folder, Settings(device=3))


def test_a_case_is_equal_after_the_transfer(case, tmp_path):
    found, settings = arrived(case, Settings(root=tmp_path, seed=7, backend="fake"), tmp_path / "job")
    assert [check.params for check in found.checks] == [check.params for check in case.checks]
    assert found.checks == case.checks
    assert (found.name, found.quantize, found.tune) == (case.name, case.quantize, case.tune)
    assert {found.model.name, found.inputs.calibration.name} == {"chain.onnx", "data.npz"}
    assert all(path.is_relative_to(tmp_path / "job") for path in (found.model, found.spec, settings.output))
    assert (settings.seed, settings.backend, settings.device) == (7, "fake", 3)


def test_external_data_is_sent(tmp_path):
    weights = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    onnx.save(chain_model(), tmp_path / "chain.onnx", **weights)
    case = Case(id="default", model=tmp_path / "chain.onnx")
    _, files = pack(case, Settings(root=tmp_path), tmp_path / "out")
    assert {*files} == {in_job(tmp_path / name).as_posix() for name in ("chain.onnx", "w.bin")}


@pytest.mark.parametrize(
    ("settings", "fields", "message"),
    [
        ({"plugin": (Path("a.so"),)}, {}, "qdqspec worker ADDRESS"),
        ({}, {"metrics": {"top1": lambda outputs, labels: 1.0}}, "top1 is Python code"),
        (
            {},
            {"inputs": Inputs(calibration=Data(loader="own:feeds"))},
            "data loader own:feeds is Python code",
        ),
        ({}, {"model": Path("/no.onnx")}, "does not exist"),
    ],
)
def test_what_a_worker_cannot_have_is_an_error(case, tmp_path, settings, fields, message):
    with pytest.raises((ConfigError, DataError), match=message):
        pack(replace(case, **fields), Settings(root=tmp_path, **settings), tmp_path)


def test_files_of_a_glob_and_baselines_are_sent(case, tmp_path):
    baselines = tmp_path / "__baselines__" / "chain"
    (baselines / ".qdqspec-1-1-x.part").mkdir(parents=True)
    for name in ("fake.json", ".qdqspec-1-1-x.part/whole"):
        (baselines / name).touch()
    (tmp_path / "photos").mkdir()
    for name in ("a.npz", "b.npz", "c.txt"):
        (tmp_path / "photos" / name).write_bytes(name.encode())
    globbed = replace(case, inputs=replace(case.inputs, calibration=tmp_path / "photos" / "*.npz"))
    found, _ = arrived(globbed, Settings(root=tmp_path), tmp_path / "job")
    names = pack(globbed, Settings(root=tmp_path), tmp_path)[1]
    assert [name.partition("chain/")[2] for name in names if "__baselines__" in name] == ["fake.json"]
    assert [name.rpartition("/")[2] for name in names if name.endswith("npz")] == [
        "a.npz",
        "b.npz",
        "data.npz",
    ]
    assert found.inputs.calibration.name == "*.npz"
    assert found.inputs.calibration.is_relative_to(tmp_path / "job")
