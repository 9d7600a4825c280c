"""A short outage of an S3 datastore delays a run; a long one ends it with a clear message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decorators import _metaflow
from decorators._metaflow import WaitedJob, datastores
from decorators.backends import waiting_datastore
from decorators.backends.waiting_datastore import DatastoreWatch
from decorators.s3_datastore import FIRST_S, OutageWait, S3Storage
from estimator.errors import UserError
from tests.decorators.conftest import Home
from tests.lab import faulty_proxy
from tests.lab.faulty_proxy import Faults
from tests.lab.object_store import BUCKET, ObjectStore

ROOT = f"s3://{BUCKET}/metaflow"
AWAY_S = 120.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    pytest.importorskip("moto.server", reason="needs moto[server] for an S3 on this machine")
    with ObjectStore(tmp_path_factory.mktemp("s3")) as started:
        yield started


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def url(store: ObjectStore, faults: Faults) -> Iterator[str]:
    """Address of S3 behind a proxy with these faults."""
    with faulty_proxy.before(store.url, faults) as address:
        yield address


class Clock:
    """A simulated clock: sleeping advances it, and scheduled changes take place."""

    def __init__(self) -> None:
        self.now, self.then = 0.0, dict[float, Callable[[], None]]()
        self.said: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for at in [at for at in self.then if at <= self.now]:
            self.then.pop(at)()

    def patience(self, *, max_outage_s: float = AWAY_S, has_responded: bool = False) -> OutageWait:
        return OutageWait(
            max_outage_s=max_outage_s,
            has_responded=has_responded,
            print_final_error=False,
            report=self.said.append,
            clock=lambda: self.now,
            sleep=self.sleep,
        )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def storage(url: str, store: ObjectStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> S3Storage:
    """A store whose client tries once, because retries of boto3 are not under test."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import ClientError

    def client() -> tuple[Any, type[Exception]]:
        once = Config(retries={"total_max_attempts": 1}, proxies={})
        keys = {name.lower(): value for name, value in store.keys.items()}
        made = boto3.client("s3", endpoint_url=url, region_name="us-east-1", config=once, **keys)
        return made, ClientError

    monkeypatch.setattr(_metaflow, "s3_client", client)
    return S3Storage(f"{ROOT}/Flow", clock.patience())


def stop_responding(faults: Faults) -> None:
    faults.gone = True


def recover(faults: Faults) -> None:
    faults.gone, faults.expired, faults.busy_share = False, False, 0.0


def expires(faults: Faults) -> None:
    faults.expired = True


def reject_requests(faults: Faults) -> None:
    faults.busy_share = 1.0


@pytest.mark.parametrize("inject_fault", [stop_responding, reject_requests, expires])
def test_requests_during_an_s3_outage_succeed_afterwards_and_the_wait_is_reported_once(
    storage: S3Storage, faults: Faults, clock: Clock, tmp_path: Path, inject_fault: Callable[[Faults], None]
) -> None:
    (tmp_path / "file").write_bytes(b"weights")
    storage.put_bytes("a", b"1")
    calls: list[Callable[[], Any]] = [
        lambda: storage.get_bytes("a"),
        lambda: storage.put_file("b", tmp_path / "file"),
        lambda: storage.get_file("b", tmp_path / "back"),
        lambda: storage.size("b"),
        lambda: storage.keys(""),
        lambda: storage.delete(["b"]),
    ]
    answers = []
    for number, ask in enumerate(calls, start=1):
        inject_fault(faults)
        clock.then[clock.now + 20] = lambda: recover(faults)
        answers.append(ask())
        assert len(clock.said) == number, clock.said
    assert answers == [b"1", None, None, 7, ["a", "b"], True]
    assert (tmp_path / "back").read_bytes() == b"weights"
    assert f"The datastore {ROOT}/Flow" in clock.said[0]
    assert clock.said[0].endswith("retrying for 2 min.")
    assert storage.size("b") is None


@pytest.mark.parametrize(
    ("inject_fault", "expected"),
    [
        (stop_responding, rf"The datastore {ROOT}/Flow has not responded for 2 min \(\w+\)"),
        (reject_requests, r"has not responded for 2 min \(503\)"),
        (expires, rf"{ROOT}/Flow: the AWS credentials have expired"),
    ],
)
def test_a_long_outage_is_an_error_after_its_time_limit_and_later_requests_do_not_wait(
    storage: S3Storage, faults: Faults, clock: Clock, inject_fault: Callable[[Faults], None], expected: str
) -> None:
    storage.put_bytes("a", b"1")
    inject_fault(faults)
    for _ in range(2):
        with pytest.raises(UserError, match=expected if clock.now == 0 else None):
            storage.size("a")  # a HEAD, to which S3 says 400 and no reason
        assert clock.now == AWAY_S


@pytest.mark.parametrize(("inject_fault", "waited"), [(stop_responding, FIRST_S), (expires, 0.0)])
def test_a_datastore_that_never_responded_is_abandoned_early(
    storage: S3Storage, faults: Faults, clock: Clock, inject_fault: Callable[[Faults], None], waited: float
) -> None:
    inject_fault(faults)
    with pytest.raises(UserError):
        storage.get_bytes("a")
    assert clock.now == waited


def test_the_time_limit_of_an_outage_starts_at_the_last_response(
    storage: S3Storage, faults: Faults, clock: Clock
) -> None:
    waits = clock.patience(has_responded=True)
    stop_responding(faults)
    clock.now = 10_000.0
    with pytest.raises(UserError):
        waits.call(ROOT, lambda: storage._client.list_objects_v2(Bucket=BUCKET), since=clock.now - 40)
    assert clock.now == 10_000.0 + AWAY_S - 40
    clock.then[clock.now + FIRST_S / 2] = lambda: recover(faults)
    other = clock.patience(has_responded=True)
    assert other.call(ROOT, lambda: storage._client.list_objects_v2(Bucket=BUCKET), since=0.0)


def test_permanent_errors_of_s3_are_not_retried(storage: S3Storage, clock: Clock) -> None:
    other = S3Storage("s3://no-such-bucket/metaflow", clock.patience())
    with pytest.raises(Exception, match="NoSuchBucket"):
        other.put_bytes("a", b"1")
    assert clock.now == 0


JOB = WaitedJob(backend="kubernetes", kind="jobset", name="js-1", namespace="n")


@pytest.mark.parametrize(
    ("inject_fault", "expected"), [(stop_responding, "has not responded"), (expires, "have expired")]
)
def test_a_step_whose_datastore_remains_unreachable_is_ended_with_its_containers(
    url: str,
    store: ObjectStore,
    faults: Faults,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    inject_fault: Callable[[Faults], None],
    expected: str,
) -> None:
    from metaflow import metaflow_config

    for name, value in store.credentials().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(metaflow_config, "DATATOOLS_CLIENT_PARAMS", {"endpoint_url": url})
    ended: list[str] = []
    watch = DatastoreWatch(
        root=ROOT,
        probe=lambda: waiting_datastore.probe_once(ROOT),
        remove=lambda job: ended.append(job.name),
        outage_wait=clock.patience(max_outage_s=20, has_responded=True),
        clock=lambda: clock.now,
    )
    watch(JOB)
    waiting_datastore.probe_once("s3://no-such-bucket/metaflow")  # an answer, too
    inject_fault(faults)
    watch(JOB)  # it has just looked
    clock.now += waiting_datastore.PROBE_EVERY_S
    with pytest.raises(UserError, match=rf"{ROOT}.*{expected}.*; jobset js-1 was removed\."):
        watch(JOB)
    assert ended == ["js-1"]
    watch(JOB)  # while this process ends, Metaflow asks on
    assert ended == ["js-1"]


# -- Metaflow's own patience -------------------------------------------------------------------------------

READ_LIMITS = """
import json
from decorators import _metaflow
_metaflow.limit_datastore()
from metaflow.plugins.datatools.s3 import s3, s3util
from metaflow.plugins.datatools.s3.s3util import get_s3_client
config = get_s3_client()[0].meta.config
attempts = config.retries["total_max_attempts"]
print(json.dumps([s3.S3_RETRY_COUNT, s3.S3_TRANSIENT_RETRY_COUNT, s3util.S3_RETRY_COUNT, attempts,
                  config.connect_timeout, _metaflow.datastore_variables()]))
"""


def limits(home: Home, **environment: str) -> list[Any]:
    import json

    done = home.python("-c", READ_LIMITS, AWS_DEFAULT_REGION="us-east-1", **environment)
    assert done.returncode == 0, done.stderr
    limits_seen: list[Any] = json.loads(done.stdout)
    return limits_seen


def test_metaflow_retries_s3_for_minutes_in_containers_too(home: Home) -> None:
    *container_limits, carried = limits(home)
    assert container_limits == [2, 6, 2, 3, 20]
    assert carried["METAFLOW_S3_TRANSIENT_RETRY_COUNT"] == "6"
    assert limits(home, **carried)[:4] == container_limits[:4], "a container has the same"


def test_the_users_retry_limits_apply_in_containers_too(home: Home) -> None:
    retry_settings = {"METAFLOW_S3_RETRY_COUNT": "9", "FINETUNE_DATASTORE_TIMEOUT": "1"}
    *container_limits, carried = limits(home, **retry_settings)
    assert container_limits[:3] == [9, 3, 9]
    assert retry_settings.items() <= carried.items()


def test_a_limit_that_is_not_a_number_is_reported_in_two_lines(home: Home) -> None:
    done = home.run("profiled.py", "run", FINETUNE_DATASTORE_TIMEOUT="soon")
    assert done.returncode == 2
    assert "FINETUNE_DATASTORE_TIMEOUT=soon must be a number of minutes above 0." in done.stderr
    assert "Traceback" not in done.stderr


# -- whole runs on this machine ----------------------------------------------------------------------------


def test_a_local_datastore_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from metaflow.plugins.datastores.local_storage import LocalStorage

    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(LocalStorage, "SYSROOT_VAR", str(blocked))
    with pytest.raises(UserError, match=f"^{blocked} is not writable") as caught:
        datastores.check_local_datastore()
    assert "METAFLOW_DATASTORE_SYSROOT_LOCAL" in caught.value.advice
    monkeypatch.setattr(LocalStorage, "SYSROOT_VAR", str(tmp_path / "new" / "folder"))
    datastores.check_local_datastore()
    assert not (tmp_path / "new").exists()
