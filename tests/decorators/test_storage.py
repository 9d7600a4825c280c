"""The datastore of a run as a store of bundles: local, S3 (moto), and Google Cloud Storage (emulated)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metaflow.plugins.datastores.local_storage import LocalStorage as MetaflowLocal

from decorators import storage as storage_module
from decorators.storage import MetaflowStorage, fetch_model
from estimator.errors import UserError
from launchers.store.bundles import get_bundle, has_bundle, put_bundle


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The address of an S3 server on this machine."""
    pytest.importorskip("moto.server", reason="needs moto[server] for an S3 on this machine")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


class OtherKind(MetaflowLocal):  # type: ignore[misc]
    """A datastore of another kind with nothing but the interface of Metaflow."""

    TYPE = "other"


def _s3_storage(address: str, monkeypatch: pytest.MonkeyPatch) -> MetaflowStorage:
    import boto3

    from decorators import _metaflow

    client = boto3.client(
        "s3", endpoint_url=address, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    client.create_bucket(Bucket="bucket")
    from botocore.exceptions import ClientError

    monkeypatch.setattr(_metaflow, "s3_client", lambda: (client, ClientError))

    class S3Kind:
        TYPE = "s3"
        datastore_root = "s3://bucket/some/root"

    return MetaflowStorage(S3Kind(), f"Flow{os.getpid()}/finetune")


@pytest.fixture(scope="module")
def google() -> Iterator[Any]:
    """A client of a local Google Cloud Storage emulator, with a bucket."""
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator")
    cloud = pytest.importorskip("google.cloud.storage", reason="needs google-cloud-storage")
    from google.auth.credentials import AnonymousCredentials

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    address = {"api_endpoint": f"http://127.0.0.1:{port}"}
    try:
        yield cloud.Client(credentials=AnonymousCredentials(), project="none", client_options=address)
    finally:
        server.stop()


def _google_storage(client: Any, monkeypatch: pytest.MonkeyPatch) -> MetaflowStorage:
    from metaflow.plugins.datastores import gs_storage

    monkeypatch.setattr(gs_storage, "get_gs_storage_client", lambda: client)  # else it asks Google who we are
    return MetaflowStorage(gs_storage.GSStorage("gs://bucket/some/root"), f"Flow{uuid.uuid4()}/finetune")


@pytest.fixture(params=["local", "s3", "gs", "other"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MetaflowStorage:
    if request.param == "s3":
        return _s3_storage(request.getfixturevalue("s3"), monkeypatch)
    if request.param == "gs":
        return _google_storage(request.getfixturevalue("google"), monkeypatch)
    kind = MetaflowLocal if request.param == "local" else OtherKind
    return MetaflowStorage(kind(str(tmp_path / "root")), "Flow/finetune")


def test_a_stored_bundle_is_fetched_unchanged(store: MetaflowStorage, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights.bin").write_bytes(os.urandom(3_000_000))
    (folder / "empty").write_bytes(b"")
    put_bundle(store, "checkpoints/1", folder)
    assert has_bundle(store, "checkpoints/1")
    get_bundle(store, "checkpoints/1", tmp_path / "back")
    for name in ("deep/weights.bin", "empty"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()


def test_small_values_can_be_overwritten_and_listed(store: MetaflowStorage) -> None:
    store.put_bytes("runs/1/origin", b"0")
    store.put_bytes("runs/1/origin", b"00")
    store.put_bytes("runs/12/origin", b"1")
    assert (store.get_bytes("runs/1/origin"), store.size("runs/1/origin")) == (b"00", 2)
    assert store.keys("runs/1") == ["runs/1/origin"]
    assert (store.keys("runs"), store.keys("nothing/here")) == (["runs/1/origin", "runs/12/origin"], [])


def test_a_missing_key_raises_file_not_found(store: MetaflowStorage, tmp_path: Path) -> None:
    assert store.size("no/such") is None
    with pytest.raises(FileNotFoundError):
        store.get_bytes("no/such")
    with pytest.raises(FileNotFoundError):
        store.get_file("no/such", tmp_path / "file")
    with pytest.raises(UserError):
        get_bundle(store, "no/such", tmp_path / "folder")


def test_files_are_deleted_if_possible_and_a_refusal_is_reported_once(
    store: MetaflowStorage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module._OtherStorage, "_warned", False)
    store.put_bytes("old/a", b"1")
    removed = [store.delete(["old/a", "old/never-there"]), store.delete(["old/a"])]
    if store.kind in ("gs", "other"):
        assert removed == [False, False]
        assert store.size("old/a") == 1
        assert capsys.readouterr().err.count("cannot delete files") == 1
    else:
        assert removed == [True, True]
        assert store.size("old/a") is None


def test_more_than_a_thousand_files_can_be_removed_from_s3(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = _s3_storage(s3, monkeypatch)
    requests: list[int] = []

    def delete_objects(**spans_run: Any) -> dict[str, Any]:
        requests.append(len(spans_run["Delete"]["Objects"]))
        return {}

    client: Any = store._storage._client  # type: ignore[attr-defined]
    monkeypatch.setattr(client, "delete_objects", delete_objects)
    assert store.delete(f"many/{number}" for number in range(2001))
    assert requests == [1000, 1000, 1]


def test_a_role_that_cannot_delete_from_s3_is_reported_once(
    s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from botocore.stub import ANY, Stubber

    store = _s3_storage(s3, monkeypatch)
    with Stubber(store._storage._client) as answers:  # type: ignore[attr-defined]
        for _ in range(2):
            answers.add_response(
                "delete_objects",
                {"Errors": [{"Key": "old/a", "Code": "AccessDenied"}]},
                {"Bucket": "bucket", "Delete": ANY},
            )
        assert [store.delete(["old/a"]), store.delete(["old/a"])] == [False, False]
    assert capsys.readouterr().err.count("S3 denied deleting s3://bucket/old/a (AccessDenied)") == 1


def test_a_finished_model_is_fetched_from_the_configured_datastore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from decorators import _metaflow

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    configured = MetaflowLocal(str(tmp_path / "root"))
    put_bundle(MetaflowStorage(configured, "FinetuneFlow/finetune"), "models/7", tmp_path / "model")
    monkeypatch.setattr(_metaflow, "configured_storage", lambda: configured)
    assert (fetch_model("FinetuneFlow/7", tmp_path / "mine") / "config.json").read_text() == "{}"
    with pytest.raises(UserError, match="models/8"):
        fetch_model("FinetuneFlow/8", tmp_path / "other")


def test_the_address_of_a_key_is_its_url_or_path(store: MetaflowStorage, tmp_path: Path) -> None:
    address = store.describe("models/1")
    assert address.endswith("/finetune/models/1")
    cloud = store.kind in ("s3", "gs")
    assert address.startswith(f"{store.kind}://bucket/some/root/" if cloud else str(tmp_path))
    assert store.is_local == (store.kind == "local")
