"""A checklist measures and judges normally while unknown clients connect."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from pathlib import Path

import pytest

from checklist.measurements import Measurements
from checklist.options import Options
from checklist.run import local
from checklist.run.control import Hub, Limits, Positions, Reply, WorkerReply, join
from checklist.run.node_agent import run
from checklist.run.rendezvous import Rendezvous, of_node
from checklist.run.worker_process import WorkerProcess
from checklist.verdict import judge
from launchers.cluster.endpoint import Secret
from tests.launchers.cluster.strangers import common, completes_greeting, forwarded_port, repeated_attacks

ROOT = Path(__file__).parents[3]
LIMITS = Limits(rendezvous=20.0, operation=2.0, settle=0.5, lost_after=3.0)
CLAIM = b'{"ranks":[1],"node":1,"world":2,"host":"stranger"}'
LIES = (
    b'{"kind":"ended","rank":1,"reason":"a stranger says so","at":["facts",1,"S"]}',
    b'{"kind":"end","error":"a stranger says so","advice":""}',
)


def rendezvous_of(node: int, port: int, secret: Secret, host: str = "127.0.0.1") -> Rendezvous:
    return of_node(
        node=node, nodes=2, processes=1, host=host, port=port, secret=secret, run="job", simulated=True
    )


def new_port() -> int:
    return 20_000 + secrets.randbelow(9_000)


def test_a_checklist_passes_while_unknown_clients_connect(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = Options(device="cpu", nodes=2, gpus_per_node=1, only=("ranks", "mesh", "correctness"))
    secret, port = Secret.make(), new_port()
    ends: dict[int, Measurements] = {}

    def one(node: int) -> None:
        ends[node] = run(options, rendezvous_of(node, port, secret))

    ports = rendezvous_of(0, port, secret).ports
    forged = [
        completes_greeting("checklist/job", known_secret, CLAIM, lie)
        for known_secret in ("", "guessed")
        for lie in LIES
    ]
    with repeated_attacks(ports[:1], [*common(), *forged]) as tried:
        first = threading.Thread(target=one, args=(0,), daemon=True)
        first.start()
        time.sleep(2)  # the strangers are there first
        begin = time.monotonic()
        second = threading.Thread(target=one, args=(1,), daemon=True)
        second.start()
        for thread in (first, second):
            thread.join(120)
        seconds = time.monotonic() - begin
        assert tried() > 300
    measured = ends[0]
    assert [fact.rank for fact in measured.facts] == [0, 1]
    assert measured == ends[1]
    assert not any("stranger" in note or "Rejected rank" in note for note in measured.notes)
    assert measured.hangs == ()
    result = judge(measured, checks=options.checks)
    assert result.verdict in ("PASS", "WARN"), result.headline
    assert "Traceback" not in capfd.readouterr().err
    print(f"strangers called {tried():,} times; the run took {seconds:.1f} s")


def test_a_disconnected_node_agent_is_reported_and_may_rejoin() -> None:
    secret, port = Secret.make(), new_port()
    main_place = rendezvous_of(0, port, secret)
    with contextlib.closing(Hub(main_place, LIMITS)) as hub:
        with forwarded_port(main_place.ports[0]) as (other, cut):
            far = of_node(node=1, nodes=2, processes=1, host="127.0.0.1", secret=secret, run="job")
            far = type(far)(**{**_fields(far), "ports": (other,)})
            first = join(far, LIMITS)
            begin = time.monotonic()
            cut()
            event = hub.events.get(timeout=5)
            assert (event.peer.request.node, "broke" in (event.lost or "")) == (1, True)
            print(f"told after {time.monotonic() - begin:.2f} s")
            first.close()
        rejoined = join(rendezvous_of(1, port, secret), LIMITS)
        assert set(hub.peers()) == {1}
        assert hub.refused() == []
        rejoined.close()


def _fields(rendezvous: Rendezvous) -> dict[str, object]:
    return {name: getattr(rendezvous, name) for name in rendezvous.__dataclass_fields__}


@pytest.mark.parametrize(
    "frame",
    [
        b'{"kind":"from","rank":1,"reply":{"kind":"done","id":Infinity}}',
        b'{"kind":"from","rank":1}',
        b'{"kind":"ended","rank":1,"reason":1,"at":[]}',
        b"[" * 100_000,
    ],
    ids=["infinity", "missing", "type", "nested"],
)
def test_an_invalid_message_gives_one_line_and_ends_only_that_connection(frame: bytes) -> None:
    secret, port = Secret.make(), new_port()
    with contextlib.closing(Hub(rendezvous_of(0, port, secret), LIMITS)) as hub:
        other, member = (
            join(rendezvous_of(0, port, secret), LIMITS),
            join(rendezvous_of(1, port, secret), LIMITS),
        )
        member._socket.sendall(len(frame).to_bytes(4, "big") + frame)
        event = hub.events.get(timeout=5)
        assert "not of this protocol" in (event.lost or "")
        assert "\n" not in (event.lost or "")
        other.send(Positions(ranks={0: ("facts", 1, "S")}))
        assert hub.events.get(timeout=5).message == Positions(ranks={0: ("facts", 1, "S")})
        other.close()
        member.close()


def test_a_member_can_report_for_its_own_ranks_only() -> None:
    secret, port = Secret.make(), new_port()
    with contextlib.closing(Hub(rendezvous_of(0, port, secret), LIMITS)) as hub:
        member = join(rendezvous_of(1, port, secret), LIMITS)
        member.send(WorkerReply(rank=0, reply=Reply(kind="done", id=1)))
        assert "a message of rank 0, which it has not" in (hub.events.get(timeout=5).lost or "")
        member.close()


def test_node_agents_connect_over_ipv6() -> None:
    secret, port = Secret.make(), new_port()
    with contextlib.closing(Hub(rendezvous_of(0, port, secret, host="::1"), LIMITS)) as hub:
        member = join(rendezvous_of(1, port, secret, host="::1"), LIMITS)
        assert set(hub.peers()) == {1}
        member.close()


def test_a_job_on_one_host_listens_on_its_loopback_only() -> None:
    alone = of_node(node=0, nodes=1, processes=1, host="0.0.0.0", port=new_port(), secret=Secret.make())  # noqa: S104
    with contextlib.closing(Hub(alone, LIMITS)):
        socket.create_connection(("127.0.0.1", alone.ports[0]), timeout=2).close()
        with contextlib.closing(socket.socket()) as sock, pytest.raises(ConnectionRefusedError):
            sock.connect(("127.0.0.2", alone.ports[0]))


def read_process_file(pid: int, name: str, expected_marker: bytes) -> bytes:
    """Read ``/proc/PID/name`` once it has the marker, or after 10 s; before exec it is the parent's."""
    file, deadline = Path(f"/proc/{pid}/{name}"), time.monotonic() + 10
    while expected_marker not in (content := file.read_bytes()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return content


def test_the_secret_of_a_local_run_is_neither_in_arguments_nor_in_the_environment(
    tmp_path: Path,
) -> None:
    secret = Secret.make()
    options = Options(device="cpu", nodes=2, gpus_per_node=1, only=("ranks",))
    process = local._start(options, rendezvous_of(1, new_port(), secret), (), tmp_path)
    try:
        for name, expected_marker in (
            ("cmdline", b"checklist.run.local"),
            ("environ", b"CHECKLIST_LOCAL_NODE=1"),
        ):
            content = read_process_file(process.pid, name, expected_marker)
            assert expected_marker in content
            assert secret.text.encode() not in content
    finally:
        process.kill()
        process.wait()


def test_workers_do_not_receive_the_secret_of_their_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CHECKLIST_SECRET", "of this job")
    with contextlib.closing(
        WorkerProcess(rank=0, local_rank=0, node=0, directory=tmp_path, environment={}, report=lambda _: None)
    ) as worker:
        environment = read_process_file(worker._process.pid, "environ", b"CHECKLIST_RANK=0")  # type: ignore[union-attr]
        assert b"CHECKLIST_RANK=0" in environment
        assert b"of this job" not in environment
