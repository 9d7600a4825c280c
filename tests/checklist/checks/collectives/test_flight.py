"""The flight recorder of torch shows the collective in which ranks wait and the rank that is missing."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest

from checklist.checks.collectives import flight
from checklist.run.control import Reply, WorkerCommand
from checklist.run.worker_process import WorkerProcess

LIMIT_S = 90.0  # importing torch on a busy machine


def entry(number: int, sequence: int, *, retired: bool = True, p2p: bool = False) -> dict[str, Any]:
    return {
        "record_id": number,
        "collective_seq_id": sequence,
        "profiling_name": "nccl:send" if p2p else "nccl:all_reduce",
        "is_p2p": p2p,
        "retired": retired,
        "state": "scheduled",
        "input_sizes": [[1024, 8]],
        "input_dtypes": ["BFloat16"],
    }


def test_a_rank_is_located_by_its_last_collective_ignoring_point_to_point_sends() -> None:
    last_entry = flight.newest_entry(
        {"entries": [entry(0, 1), entry(1, 2, retired=False), entry(2, 2, p2p=True)]}
    )
    assert last_entry == {
        "sequence": 2,
        "operation": "nccl:all_reduce",
        "waits": True,
        "size": "1024x8 BFloat16",
    }
    assert flight.newest_entry({"entries": [entry(0, 0, p2p=True)]}) is None
    assert flight.newest_entry({}) is None


def test_the_rank_with_the_lowest_sequence_number_is_behind_unless_all_are_equal() -> None:
    at = {rank: flight.newest_entry({"entries": [entry(0, 7, retired=False)]}) or {} for rank in range(3)}
    assert flight.lagging(at) == []
    at[1] = flight.newest_entry({"entries": [entry(0, 6)]}) or {}
    assert flight.lagging(at) == [1]
    assert flight.describe(at, 1) == (
        "flight recorder: it has ended collective 6, nccl:all_reduce of 1024x8 BFloat16; "
        "rank 0, 2 in collective 7, nccl:all_reduce of 1024x8 BFloat16"
    )
    assert flight.describe({}, 1) is None


@pytest.mark.slow
def test_flight_recorders_name_the_rank_that_never_joins_a_collective(tmp_path: Path) -> None:
    received: queue.Queue[Any] = queue.Queue()
    local = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    workers = [
        WorkerProcess(
            rank=rank, local_rank=0, node=rank, directory=tmp_path, environment=local, report=received.put
        )
        for rank in range(2)
    ]

    def answers(count: int) -> dict[int, Reply]:
        return {said.rank: said.reply for said in (received.get(timeout=LIMIT_S) for _ in range(count))}

    def send_command(worker: WorkerProcess, number: int, what: str, arguments: dict[str, Any]) -> None:
        worker.send(WorkerCommand(rank=worker.rank, id=number, what=what, arguments=arguments))

    try:
        send_command(workers[0], 1, "store", {"address": "127.0.0.1"})
        port = answers(1)[0].reply
        group = {
            "where": ("127.0.0.1", port),
            "group": "g",
            "backend": "gloo",
            "world": 2,
            "limit_s": LIMIT_S,
        }
        for worker in workers:
            send_command(worker, 2, "join", group)
        assert {said.kind for said in answers(2).values()} == {"done"}
        all_reduce = {"op": "all_reduce", "dtype": "float32", "elements": 1000}
        for worker in workers:
            send_command(worker, 3, "correct", all_reduce)
        assert {said.kind for said in answers(2).values()} == {"done"}

        send_command(workers[0], 4, "correct", all_reduce)  # the other is not told
        records: dict[int, Any] = {}
        for _ in range(100):
            for worker in workers:
                send_command(worker, 5, "trace", {})
            records = {rank: said.record for rank, said in answers(2).items()}
            if records[0]["waits"] and not records[1]["waits"]:  # which its recorder notes a moment later
                break
        assert records[0]["waits"]
        assert not records[1]["waits"]
        assert flight.lagging(records) == [1]
        reported = flight.describe(records, 1)
        assert reported is not None
        assert "it has ended collective" in reported
        assert f"rank 0 in collective {records[0]['sequence']}, gloo:all_reduce of 1000 Float" in reported
    finally:
        for worker in workers:
            worker.close()
