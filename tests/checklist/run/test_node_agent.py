"""The control channel and worker processes: joining, blame for hangs, and cleanup."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import secrets
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from checklist.condensed import MAX_PROBES
from checklist.measurements import IDLE, Measurements, Probe, record
from checklist.options import Options
from checklist.run import coordinator as coordinator_module
from checklist.run import worker_process
from checklist.run.control import (
    End,
    Hub,
    Limits,
    PositionQuery,
    Positions,
    WorkerCommand,
    WorkerEnded,
    WorkerReply,
    join,
)
from checklist.run.coordinator import Coordinator
from checklist.run.node_agent import run
from checklist.run.rendezvous import Rendezvous, from_environment, of_node
from checklist.run.requests import Requests, _lagging
from checklist.run.worker_process import WorkerProcess
from estimator.errors import UserError
from launchers.cluster.endpoint import Secret
from launchers.cluster.rendezvous import Beat

SHORT = Limits(rendezvous=5.0, operation=2.0, settle=0.5, lost_after=3.0)


def rendezvous_of(node: int, nodes: int = 2, **overrides: object) -> Rendezvous:
    port = overrides.pop("port", None) or 20_000 + secrets.randbelow(9_000)
    values = {"secret": Secret("s"), **overrides}
    return of_node(node=node, nodes=nodes, processes=1, host="127.0.0.1", port=port, **values)  # type: ignore[arg-type]


@pytest.fixture
def worker(tmp_path: Path) -> object:
    received: queue.Queue[WorkerReply | WorkerEnded] = queue.Queue()
    made = WorkerProcess(
        rank=0, local_rank=0, node=0, directory=tmp_path, environment={}, report=received.put
    )
    yield made, received
    made.close()


def test_a_duplicate_rank_is_refused_with_both_hosts_named() -> None:
    first = rendezvous_of(0)
    with contextlib.closing(Hub(first, SHORT)) as hub:
        link = join(first, SHORT)
        with pytest.raises(UserError, match="claims rank 0, and so does"):
            join(first, SHORT)
        link.close()
        assert len(hub.refused()) == 1


def test_a_rank_of_a_job_of_another_size_is_refused() -> None:
    port = 20_000 + secrets.randbelow(9_000)
    with (
        contextlib.closing(Hub(rendezvous_of(0, 2, port=port), SHORT)),
        pytest.raises(UserError, match="expects 3 ranks, rank 0 2"),
    ):
        join(rendezvous_of(2, 3, port=port), SHORT)


@pytest.mark.parametrize(
    "differs", [{"run": "another"}, {"secret": Secret("another")}, {"secret": Secret("")}]
)
def test_members_with_another_job_or_secret_are_refused(differs: dict[str, object]) -> None:
    port = 20_000 + secrets.randbelow(9_000)
    with contextlib.closing(Hub(rendezvous_of(0, port=port), SHORT)) as hub:
        with pytest.raises(UserError, match="could not be reached"):
            join(rendezvous_of(1, port=port, **differs), Limits(rendezvous=0.4))
        assert hub.peers() == {}


def test_the_end_of_a_run_reaches_a_node_agent_that_is_still_sending() -> None:
    main_place = rendezvous_of(1)
    hub = Hub(main_place, SHORT)
    link = join(main_place, SHORT)
    stop = threading.Event()

    def send_beats() -> None:
        while not stop.is_set() and link.send(Beat()):
            pass

    talking = threading.Thread(target=send_beats, daemon=True)
    talking.start()
    try:
        hub.send(End(measurements={"x": "x" * 200_000}))
        leaving = threading.Thread(target=hub.close, daemon=True)
        leaving.start()
        time.sleep(0.3)  # a reader that is late
        assert len(link.receive().measurements["x"]) == 200_000
    finally:
        stop.set()
        link.close()
        talking.join(5)
        leaving.join(10)


@pytest.mark.parametrize(
    ("at", "blamed"),
    [
        ({0: ["all_reduce", 5, "S"], 1: ["all_reduce", 4, "S"], 2: ["all_reduce", 5, "S"]}, [1]),
        ({0: ["all_reduce", 5, "S"], 1: ["all_reduce", 5, "T"], 2: ["all_reduce", 5, "S"]}, [1]),
        ({0: ["all_reduce", 5, "S"], 2: ["all_reduce", 5, "S"]}, [1]),
        ({0: ["all_reduce", 5, "S"], 1: ["all_reduce", 5, "S"], 2: ["all_reduce", 5, "S"]}, []),
    ],
    ids=["behind", "stopped", "silent", "all alike"],
)
def test_a_late_stopped_or_silent_rank_is_named_and_none_if_all_are_equal(
    at: dict[int, list[object]], blamed: list[int]
) -> None:
    assert _lagging(at, [0, 1, 2], others_failed=False) == blamed


def test_a_request_to_nodes_that_have_not_joined_ends_at_once() -> None:
    main_place = rendezvous_of(0)
    with contextlib.closing(Hub(main_place, SHORT)) as hub:
        begin = time.monotonic()
        outcome = Requests(hub, SHORT).request("facts", {0: {}}, limit_s=30)
        assert outcome.unfinished == (0,)
        assert time.monotonic() - begin < 5


def test_a_rank_that_died_while_idle_is_recorded_once_and_not_waited_for() -> None:
    main_place = rendezvous_of(0)
    with contextlib.closing(Hub(main_place, SHORT)) as hub:
        first = join(main_place, SHORT)
        second = join(replace(main_place, ranks=(1,), node=1), SHORT)
        requests = Requests(hub, SHORT)
        requests.phase = "pairs"
        second.send(WorkerEnded(rank=1, reason="signal SIGKILL", at=("send", 7, "X")))
        requests.request("listen", {0: {}}, limit_s=0.3)  # of another, who doesn't answer
        died = [hang for hang in requests.hangs if hang.rank == 1]
        assert [(hang.kind, hang.op, hang.detail) for hang in died] == [("died", IDLE, "signal SIGKILL")]

        begin = time.monotonic()
        outcome = requests.request("send", {1: {}}, limit_s=30)
        assert time.monotonic() - begin < 5
        assert outcome.unfinished == (1,)
        assert outcome.reason == "rank 1 was lost or died in send"
        assert [hang for hang in requests.hangs if hang.rank == 1] == died
        requests.request("send", {1: {}}, limit_s=0.3)
        began_anew = [hang.kind for hang in requests.hangs if hang.rank == 1][1:]
        assert began_anew in (["hang"], ["lost"]), "waited for as any other: nobody answers here"
        first.close()
        second.close()


def test_every_node_gets_a_condensed_large_run_and_rank_0_has_the_complete_run() -> None:
    main_place = rendezvous_of(0)
    hub = Hub(main_place, SHORT)
    nodes = range(120)
    probes = [
        Probe(src=a, dst=b, connected=(a, b) != (7, 9), seconds=0.001 * b)
        for a in nodes
        for b in nodes
        if a != b
    ]
    assert len(probes) > MAX_PROBES
    links = [join(replace(main_place, ranks=(rank,), node=rank), SHORT) for rank in (0, 1)]
    try:
        coordinator = Coordinator(Options(device="cpu"), main_place, hub, SHORT, conclude=lambda _: 1)
        coordinator.results.probes += probes
        coordinator.stopped.set()  # no phase is to begin
        threading.Thread(target=coordinator.run, daemon=True).start()
        for link in links:
            while not isinstance(end := link.receive(), End):
                pass
            reported = record(Measurements, end.measurements)
            assert end.status == 1
            assert len(reported.probes) < 0.2 * MAX_PROBES
            assert [(one.src, one.dst) for one in reported.probes if not one.connected] == [(7, 9)]
        assert len(coordinator.measured.probes) == len(probes)
    finally:
        for link in links:
            link.close()
        hub.close()


def test_a_long_run_prints_its_progress_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coordinator_module, "PROGRESS_S", 0.1)
    hub = Hub(rendezvous_of(0), SHORT)
    coordinator = Coordinator(Options(device="cpu"), rendezvous_of(0), hub, replace(SHORT, rendezvous=65.0))
    try:
        threading.Thread(target=coordinator.run, daemon=True).start()
        reported = ""
        deadline = time.monotonic() + 10
        while reported.count("checklist: ") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            reported += capfd.readouterr().err
        assert "checklist: 0 of 2 ranks have joined, 0:01 of at most 1:05\n" in reported
        coordinator.phase, coordinator._phase_began = "pairs", time.monotonic() - 75.5
        coordinator.phase_ends = coordinator._phase_began + 120.5
        assert coordinator.stage() == "pairs of nodes, 1:16 of at most 2:01, 0 measured"
    finally:
        coordinator.stop()
        hub.close()


def test_measurements_are_shown_as_soon_as_a_node_is_lost() -> None:
    main_place = rendezvous_of(0)
    with contextlib.closing(Hub(main_place, SHORT)) as hub:
        first = join(main_place, SHORT)
        second = join(replace(main_place, ranks=(1,), node=1), SHORT)
        shown: list[Measurements] = []
        coordinator = Coordinator(Options(device="cpu", only=("mesh",)), main_place, hub, SHORT, shown.append)
        coordinator.phase = "mesh"
        threading.Timer(0.3, second.close).start()
        coordinator.request("local", {0: {}, 1: {}}, limit_s=1.0, operation="probe")
        (known_measurements,) = shown
        assert [(hang.rank, hang.node, hang.kind, hang.op) for hang in known_measurements.hangs] == [
            (1, 1, "lost", "probe")
        ]
        phases = {phase.name: (phase.status, phase.reason) for phase in known_measurements.phases}
        assert phases["pairs"] == ("skipped", "not requested")
        status, reason = phases["mesh"]
        assert status == "failed"
        assert re.fullmatch(r"it had not ended when node 1 \(\S+\) was lost", reason or "")
        assert [(hang.rank, hang.kind) for hang in coordinator.hangs if hang.rank == 1] == [(1, "lost")]
        first.close()


def test_workers_answer_requests_and_report_failures(worker: object) -> None:
    process, received = worker  # type: ignore[misc]
    process.send(WorkerCommand(rank=0, id=1, what="listen", arguments={"address": "127.0.0.1"}))
    process.send(WorkerCommand(rank=0, id=2, what="listen", arguments={"nonsense": 1}))
    first, second = received.get(timeout=20), received.get(timeout=20)
    assert first.reply.kind == "done"
    assert second.reply.kind == "failed"
    assert "nonsense" in second.reply.error


def test_a_killed_worker_is_reported_with_its_signal_and_can_be_restarted(worker: object) -> None:
    process, received = worker  # type: ignore[misc]
    os.kill(process._process.pid, signal.SIGKILL)
    ended = received.get(timeout=10)
    assert isinstance(ended, WorkerEnded)
    assert ended.reason == "signal SIGKILL"
    process.restart()
    process.send(WorkerCommand(rank=0, id=1, what="listen", arguments={"address": "127.0.0.1"}))
    answer = received.get(timeout=20)
    assert isinstance(answer, WorkerReply)
    assert answer.reply.kind == "done"


def test_a_stopped_worker_is_killed_at_the_end(worker: object) -> None:
    process, _ = worker  # type: ignore[misc]
    pid = process._process.pid
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while process.at()[2] != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.at()[2] == "T"
    process.kill()
    assert not Path(f"/proc/{pid}").exists()


def test_a_worker_that_does_not_read_delays_its_agent_for_a_limited_time_and_then_ends(
    worker: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, received = worker  # type: ignore[misc]
    monkeypatch.setattr(worker_process, "_SEND_S", 0.2)
    pid = process._process.pid
    os.kill(pid, signal.SIGSTOP)
    larger_than_a_pipe = WorkerCommand(rank=0, id=1, what="listen", arguments={"address": "a" * 200_000})
    finished = threading.Event()

    def send() -> None:
        for _ in range(2):
            process.send(larger_than_a_pipe)
        finished.set()

    threading.Thread(target=send, daemon=True).start()
    assert finished.wait(10)
    assert received.empty(), "it is still stopped, which is reported by its position"
    os.kill(pid, signal.SIGCONT)
    ended = received.get(timeout=30)
    assert isinstance(ended, WorkerEnded)
    assert re.match("exit status 1: .*JSONDecodeError", ended.reason)
    process.restart()
    process.send(WorkerCommand(rank=0, id=2, what="listen", arguments={"address": "127.0.0.1"}))
    assert received.get(timeout=20).reply.kind == "done"


def test_a_command_larger_than_a_pipe_is_received_completely(worker: object) -> None:
    process, received = worker  # type: ignore[misc]
    name = "a" * 200_000
    process.send(WorkerCommand(rank=0, id=1, what="listen", arguments={"address": "127.0.0.1", name: 1}))
    reply = received.get(timeout=20).reply
    assert (reply.kind, reply.id) == ("failed", 1)


def test_a_run_with_a_missing_rank_ends_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr("checklist.run.node_agent.limits_of", lambda _: Limits(rendezvous=1.0, run=60))
    measured = run(Options(device="cpu", only=("ranks", "correctness")), rendezvous_of(0, simulated=True))

    assert isinstance(measured, Measurements)
    assert [fact.rank for fact in measured.facts] == [0]
    assert any("Rank 1 did not join within" in note for note in measured.notes)
    world = measured.phase("world")
    assert (world.status, world.reason) == ("skipped", "1 of 2 ranks are missing")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"},
            ((3,), (1,), 4, 1, 2, "a"),
        ),
        (
            {
                "SLURM_PROCID": "9",
                "SLURM_STEP_ID": "0",
                "SLURM_NTASKS": "16",
                "SLURM_LOCALID": "1",
                "SLURM_NODEID": "1",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_NODELIST": "gpu[03-04]",
            },
            ((9,), (1,), 16, 1, 2, "gpu03"),
        ),
    ],
    ids=["torchrun", "srun"],
)
def test_ranks_and_nodes_are_read_from_the_variables_of_the_launcher(
    variables: dict[str, str], expected: tuple[object, ...]
) -> None:
    address_read = from_environment(variables)
    assert (
        address_read.ranks,
        address_read.local_ranks,
        address_read.world,
        address_read.node,
        address_read.nodes,
        address_read.host,
    ) == expected


def test_a_rank_outside_the_world_size_is_refused() -> None:
    with pytest.raises(UserError, match="Rank 4 is not below WORLD_SIZE 2"):
        from_environment({"RANK": "4", "WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="WORLD_SIZE is 'two'"):
        from_environment({"RANK": "0", "WORLD_SIZE": "two"})


def test_control_ports_follow_the_launcher_port_or_the_configured_port() -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29600"}
    addresses = from_environment(rank)
    assert addresses.ports == tuple(range(29_617, 29_625))
    addresses = from_environment({**rank, "CHECKLIST_PORT": "4000"})
    assert addresses.ports == tuple(range(4000, 4008))
    for odd in ("80", "65535"):
        with pytest.raises(UserError, match=f"CHECKLIST_PORT={odd} is not possible"):
            from_environment({**rank, "CHECKLIST_PORT": odd})
    with pytest.raises(UserError, match="CHECKLIST_PORT is 'x'"):
        from_environment({**rank, "CHECKLIST_PORT": "x"})


def test_a_rendezvous_needs_the_variables_of_a_launcher() -> None:
    assert from_environment({"PATH": "/bin"}) is None


def test_no_rank_is_blamed_if_the_phase_ends_before_the_operation_limit() -> None:
    main_place = rendezvous_of(0, 1)
    with contextlib.closing(Hub(main_place, SHORT)) as hub:
        link = join(main_place, SHORT)

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    message = link.receive()
                    if isinstance(message, PositionQuery):
                        link.send(Positions(ranks={0: ("storage_write", 1, "S")}))

        threading.Thread(target=answer, daemon=True).start()
        requests = Requests(hub, SHORT)
        requests.phase_ends = time.monotonic() + 0.3
        outcome = requests.request("local", {0: {}}, limit_s=30)
        assert outcome.reason == "the time for the phase was over in local"
        assert requests.hangs == []
        requests.phase_ends = float("inf")
        requests.request("local", {0: {}}, limit_s=0.3)
        assert [(hang.rank, hang.op) for hang in requests.hangs] == [(0, "local")]
        link.close()
