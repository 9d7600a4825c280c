"""Plans passed between the attempts of a run, and recognition of out-of-memory failures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from estimator import Job, Plan, Target, plan
from estimator.models import find
from estimator.planning.next_plan import NextPlan, after_out_of_memory
from launchers.gang.failures import Failure
from launchers.gang.watch import oom_kills
from launchers.run.replanning import Replanning, choose_plan, plan_after_kill, plan_after_out_of_memory
from launchers.settings import Settings
from launchers.store.bundles import LocalStorage

JOB = Job(model=find("llama-8b"), global_batch_size=64)


@pytest.fixture(scope="module")
def launched() -> Plan:
    return plan(JOB, Target(kind="kubernetes", gpu="h100-sxm", nodes=1, gpus=8))


@pytest.fixture
def plans(tmp_path: Path) -> Replanning:
    return Replanning(storage=LocalStorage(tmp_path), prefix="plans/7")


def after(changed_plan: Plan, attempt: int = 0) -> NextPlan:
    following = after_out_of_memory(changed_plan, JOB, attempt=attempt)
    assert following is not None
    return following


def test_every_attempt_has_the_launched_plan_unless_memory_runs_out(
    plans: Replanning, launched: Plan
) -> None:
    assert choose_plan(plans, 0, launched) is launched
    assert choose_plan(plans, 2, launched) is launched


def test_the_plan_that_an_attempt_stores_applies_to_all_later_ones(plans: Replanning, launched: Plan) -> None:
    following = after(launched)
    plans.store_plan(0, following)
    lines: list[str] = []
    assert choose_plan(plans, 1, launched, report=lines.append) == following.plan
    assert choose_plan(plans, 2, launched) == following.plan  # attempt 1 failed for another reason
    assert following.change in lines[0]
    later_plan = after(following.plan, 1)
    plans.store_plan(1, later_plan)
    assert choose_plan(plans, 2, launched) == later_plan.plan


def test_a_plan_for_another_gpu_applies_only_if_that_gpu_was_requested(
    plans: Replanning, launched: Plan
) -> None:
    other = replace(launched, request=replace(launched.request, gpu_type="B200"))
    plans.store_plan(0, NextPlan(plan=other, change="gpu", needs_other_machine=True))
    assert choose_plan(plans, 1, launched) == launched
    assert choose_plan(plans, 1, launched, requested_plan=other) == other
    leaner = after(launched)
    plans.store_plan(0, leaner)
    plans.store_plan(1, NextPlan(plan=other, change="gpu", needs_other_machine=True))
    assert choose_plan(plans, 2, launched) == leaner.plan  # what could be had


def test_an_incomplete_plan_of_an_attempt_is_ignored(plans: Replanning, launched: Plan) -> None:
    plans.storage.put_bytes("plans/7/attempt-0.json", b'{"plan"')
    assert choose_plan(plans, 1, launched) is launched


def test_a_failed_attempt_logs_how_the_plan_of_the_next_attempt_differs(
    plans: Replanning, launched: Plan
) -> None:
    tiny = plan(
        Job(model=find("tiny-llama"), seq_len=256, global_batch_size=8),
        Target(kind="kubernetes", gpu="h100-sxm", nodes=1, gpus=1),
    )
    assert tiny.layout.micro_batch_size > 1
    settings = Settings(
        model="tiny-llama", global_batch_size=8, seq_len=256, method="full", engine="torchtune"
    )
    text = plan_after_out_of_memory(plans, 0, tiny, settings, find("tiny-llama"), other_machines=True)
    assert text.startswith(f"out of memory: a retry will use micro batch {tiny.layout.micro_batch_size} -> ")
    assert choose_plan(plans, 1, tiny).layout.micro_batch_size < tiny.layout.micro_batch_size


def test_a_container_killed_for_memory_leads_to_a_plan_that_needs_less(
    plans: Replanning,
) -> None:
    tiny = plan(
        Job(model=find("tiny-llama"), seq_len=256, global_batch_size=8, micro_batch_size=4),
        Target(kind="kubernetes", gpu="h100-sxm", nodes=1, gpus=1),
    )
    settings = Settings(
        model="tiny-llama", global_batch_size=8, seq_len=256, method="full", engine="torchtune"
    )
    assert plans.killed_container("train", 0) is None
    used = [tiny.layout.micro_batch_size]
    for attempt in (1, 2):
        plans.record_kill("train", attempt - 1, f"pod t-{attempt}")
        assert plans.killed_container("evaluate", attempt - 1) is None, "another step's attempts are its own"
        for _node in range(2):  # each node of the attempt comes to the same
            killed = plans.killed_container("train", attempt - 1)
            assert killed == f"pod t-{attempt}"
            following = plan_after_kill(plans, attempt, tiny, settings, find("tiny-llama"), killed=killed)
            assert following.startswith(f"pod t-{attempt}")
            assert "out of memory" in following
        used.append(choose_plan(plans, attempt, tiny).layout.micro_batch_size)
    assert used == [4, 2, 1]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...", True),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:131] . DefaultCPUAllocator: can't allocate memory",
            True,
        ),
        ("MemoryError: ", True),
        ("ValueError: the loss is not a number", False),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:554] Connection closed by peer", False),
    ],
)
def test_running_out_of_memory_is_recognized_by_the_messages_of_torch_and_python(
    tmp_path: Path, message: str, expected: bool
) -> None:
    path = tmp_path / "rank-00000.json"
    path.write_text(json.dumps({"rank": 0, "at": 1.0, "message": message, "traceback": ""}))
    failure = Failure.of_rank(path, node=0, host="here")
    assert failure.out_of_memory is expected
    assert Failure.from_dict(failure.to_dict()) == failure


def test_out_of_memory_kills_are_read_from_cgroup_v1_and_v2(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    two = tmp_path / "two" / "pod"
    two.mkdir(parents=True)
    (two / "memory.events").write_text("low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\n")
    group.write_text("0::/pod\n")
    assert oom_kills(group, tmp_path / "two") == 2
    one = tmp_path / "one" / "memory" / "pod"
    one.mkdir(parents=True)
    (one / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    group.write_text("5:cpu,cpuacct:/other\n4:memory:/pod\n")
    assert oom_kills(group, tmp_path / "one") == 5
    group.write_text("0::/gone\n")
    assert oom_kills(group, tmp_path / "two") is None
    assert oom_kills(tmp_path / "nothing", tmp_path) is None
