"""Disks and datastores are written and read past the cache, and nothing is left in them."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checklist.checks.storage import storage_probe
from checklist.measurements import Local
from checklist.options import Options, build, measurable
from checklist.run.local import run_local
from checklist.verdict import judge
from estimator.errors import UserError
from tests.checklist.runs import gpu_run

MIB = 1 << 20


def figures(**places: Any) -> dict[str, tuple[float | None, str | None]]:
    """Return the measurements of these places: value or None, and note or error."""
    measured_figures: dict[str, tuple[float | None, str | None]] = {}

    def figure(request_name: str, sampled: Any) -> None:
        try:
            values, note = sampled()
            measured_figures[request_name] = (values[0], note)
        except OSError as error:
            measured_figures[request_name] = (None, str(error))

    storage_probe.measure(
        figure, **{"name": "it", "directory": None, "datastore": None, "size": 16 * MIB, **places}
    )
    return measured_figures


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of an S3 server on this machine with one bucket."""
    server_module = pytest.importorskip("moto.server", reason="needs moto[server] for an S3 on this machine")
    import boto3

    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with pytest.MonkeyPatch.context() as patched:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patched.setenv(name, "test")
        patched.setenv("AWS_DEFAULT_REGION", "us-east-1")
        host, port = server.get_host_and_port()
        patched.setenv("METAFLOW_S3_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
        client.create_bucket(Bucket="data")
        yield client
    server.stop()


def keys(client: Any) -> list[str]:
    return [item["Key"] for item in client.list_objects_v2(Bucket="data").get("Contents", [])]


def test_reading_bypasses_the_page_cache(tmp_path: Path) -> None:
    def from_disk() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))

    file = storage_probe.File(tmp_path / "it")
    note = file.write(16 * MIB)[1]
    if note is not None:
        pytest.skip(f"nothing can be read from a disk here: {note}")
    before = from_disk()
    note = file.read()[1]
    size = from_disk() - before
    assert size >= 15 * MIB or note is not None, f"{size} bytes were read from disk, without a note"


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_a_directory_in_memory_is_measured_with_a_note() -> None:
    measured = figures(directory="/dev/shm")
    assert "memory, not a disk" in str(measured["storage_read"][1])
    assert not Path("/dev/shm/it").exists()


def test_a_disk_that_fills_up_during_a_write_leaves_no_partial_file(tmp_path: Path) -> None:
    previous_limits, old = (
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, old[1]))
    try:
        measured = figures(directory=str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, previous_limits)
    assert measured["storage_write"][0] is None
    assert "File too large" in str(measured["storage_write"][1])
    assert "storage_read" not in measured
    assert list(tmp_path.iterdir()) == []


def test_an_s3_datastore_is_measured_through_the_metaflow_endpoint_and_left_unchanged(s3: Any) -> None:
    measured = figures(datastore="s3://data/metaflow/")
    assert set(measured) == {"datastore_write", "datastore_read"}
    assert all(value is not None and value > 0 for value, _ in measured.values())
    assert keys(s3) == []


def test_a_datastore_that_stops_responding_during_a_write_leaves_no_object(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        storage_probe._Sink, "write", lambda *_: (_ for _ in ()).throw(OSError("the reader failed"))
    )
    measured = figures(datastore="s3://data")
    assert measured["datastore_write"][0] is not None
    assert measured["datastore_read"] == (None, "the reader failed")
    assert keys(s3) == []


def test_a_missing_bucket_is_a_failed_measurement_with_the_error_of_the_store(s3: Any) -> None:
    measured = figures(datastore="s3://other/prefix")
    assert list(measured) == ["datastore_write"]
    assert measured["datastore_write"][0] is None
    assert "NoSuchBucket" in str(measured["datastore_write"][1])


def test_leftovers_of_a_killed_process_are_removed_by_name(s3: Any, tmp_path: Path) -> None:
    (tmp_path / "left").write_bytes(b"part")
    s3.put_object(Bucket="data", Key="prefix/left", Body=b"part")
    storage_probe.remove(None, name="left", directory=str(tmp_path), datastore="s3://data/prefix")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    assert keys(s3) == []


def test_a_run_measures_the_configured_folders(tmp_path: Path) -> None:
    work, store = tmp_path / "work", tmp_path / "store"
    for folder in (work, store):
        folder.mkdir()
    only = ("storage", "datastore")
    options = Options(
        nodes=1, device="cpu", only=only, directory=work, datastore=str(store), storage_bytes=4 * MIB
    )
    result = judge(run_local(options), checks=options.checks)
    assert [(check, result.check(check).verdict) for check in only] == [  # type: ignore[union-attr]
        ("storage", "PASS"),
        ("datastore", "PASS"),
    ]
    assert {local.what for local in result.measurements.locals} == {
        "storage_write",
        "storage_read",
        "storage_files",
        "datastore_write",
        "datastore_read",
    }
    assert list(work.iterdir()) == list(store.iterdir()) == []


def _writing(keep: Path, work: Path) -> int:
    """Wait for the worker that writes its test file and return it."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for entry in Path("/proc").iterdir() if list(work.iterdir()) else ():
            with contextlib.suppress(OSError, ValueError):
                if f"CHECKLIST_DIRECTORY={keep}\0".encode() in (entry / "environ").read_bytes():
                    return int(entry.name)
        time.sleep(0.01)
    raise AssertionError("nothing was written")


@pytest.mark.slow
def test_a_rank_that_stops_while_it_writes_is_named_and_its_file_removed(tmp_path: Path) -> None:
    work, keep = tmp_path / "work", tmp_path / "keep"
    for folder in (work, keep):
        folder.mkdir()
    options = Options(
        nodes=1, device="cpu", only=("storage",), directory=work, storage_bytes=2048 * MIB, op_timeout=6
    )
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_local, options, directory=keep)
        os.kill(_writing(keep, work), signal.SIGSTOP)
        measured = running.result(timeout=150)
    assert [(hang.rank, hang.phase, hang.kind) for hang in measured.hangs] == [(0, "node", "hang")]
    assert list(work.iterdir()) == []


def test_a_datastore_that_was_not_configured_has_no_verdict() -> None:
    note = "the page cache helped"
    disks = [
        Local(rank=rank, what="storage_write", value=1.0, unit="GB/s", note=note)
        for rank in (0, 8)  # each node's first
    ]
    result = judge(gpu_run(locals=(*gpu_run().locals, *disks)))
    store = result.check("datastore")
    assert (store.verdict, store.measured) == ("NO-VERDICT", False)
    assert "no folder or S3 was given as the datastore" in store.reason
    assert result.verdict == "PASS"
    assert "Note: the page cache helped." in result.check("storage").reason  # type: ignore[union-attr]


def test_an_unwritable_datastore_is_a_failure_without_a_node() -> None:
    failed = Local(rank=3, what="datastore_write", value=None, unit="GB/s", error="AccessDenied")
    result = judge(gpu_run(locals=(*gpu_run().locals, failed)))
    assert [(fault.check, fault.code, fault.nodes) for fault in result.findings] == [
        ("datastore", "storage-failed", ())
    ]


def test_a_missing_folder_is_reported_with_its_node_and_a_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "mnt" / "data"
    probed = figures(datastore=str(missing), directory=str(missing))
    reason = (None, f"there is no folder {missing}")
    assert probed == {"storage_write": reason, "datastore_write": reason}
    failed = [
        Local(rank=rank, what="datastore_write", value=None, unit="GB/s", error=probed["datastore_write"][1])
        for rank in (0, 8)
    ]
    result = judge(gpu_run(locals=(*gpu_run().locals, *failed)))
    (fault,) = result.findings
    assert fault.title == f"The folder {missing} (datastore) does not exist on host-0, host-1."
    assert fault.advice[0].startswith("Mount it or create it there")
    assert fault.command == f"df {missing} || mkdir -p {missing}"
    assert result.bad_nodes == ()


@pytest.mark.parametrize(
    ("url", "can"), [("s3://bucket/a", True), ("/mnt/data", True), ("s3://", False), ("gs://b/a", False)]
)
def test_a_datastore_of_an_unsupported_kind_is_refused(url: str, can: bool) -> None:
    assert measurable(url) == can
    if not can:
        with pytest.raises(UserError, match="cannot be measured"):
            build(Options, {"datastore": url})
