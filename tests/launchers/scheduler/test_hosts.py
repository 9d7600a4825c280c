"""Decisions of node 0 for all nodes of a scheduler job: the plan for their common resources."""

from __future__ import annotations

import json
import os
import re
import shlex
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from estimator import hardware
from estimator.errors import UserError
from estimator.job import Machine
from estimator.plan import GIB
from launchers import settings
from launchers.scheduler.hosts import Host, Start, plan_for_hosts, prepare_start, smallest
from launchers.scheduler.ownership import Ownership
from launchers.settings.options import setting_options, translate

SMALL = Machine(cpu_cores=4, ram_bytes=16 * GIB, disk_free_bytes=100 * GIB)
H100 = ("NVIDIA H100 80GB HBM3", hardware.gpu("h100-sxm").vram_bytes)
LARGE = Machine(gpus=(H100,) * 8, cpu_cores=96, ram_bytes=900 * GIB, disk_free_bytes=4000 * GIB)


def hosts(*machines: Machine) -> list[Host]:
    return [Host(name=f"n{number}", machine=machine) for number, machine in enumerate(machines)]


def test_a_host_goes_through_json_without_loss() -> None:
    host = Host(name="n1", machine=LARGE)
    assert Host.from_dict(json.loads(json.dumps(host.to_dict()))) == host


def test_a_plan_for_unequal_nodes_uses_the_resources_that_all_nodes_have() -> None:
    fewer = replace(LARGE, gpus=(H100,) * 4, ram_bytes=1000 * GIB)
    assert smallest([LARGE, fewer]) == replace(LARGE, gpus=(H100,) * 4)


def test_the_plan_uses_exactly_the_nodes_of_the_job() -> None:
    chosen = settings.build({"model": "llama-8b", "global_batch_size": 32, "dataset": "python-docs"})
    run = plan_for_hosts(chosen, hosts(LARGE, LARGE), calibrated=False)
    assert (run.plan.request.nodes, run.plan.request.gpus_per_node) == (2, 8)
    assert run.settings.optimizer.lr == 2e-5


def test_a_run_that_does_not_fit_is_refused_in_one_line_with_an_alternative() -> None:
    chosen = settings.build({"model": "llama-70b", "method": "full", "global_batch_size": 32})
    with pytest.raises(UserError) as caught:
        plan_for_hosts(chosen, hosts(LARGE), calibrated=False)
    assert "\n" not in caught.value.problem
    assert "available GPUs" in caught.value.problem
    assert "--method lora" in caught.value.advice


def test_a_number_of_nodes_that_the_job_does_not_have_is_refused() -> None:
    chosen = settings.build({"resources": {"nodes": 4}})
    with pytest.raises(UserError, match=r"4 are requested, this job has 2 nodes"):
        plan_for_hosts(chosen, hosts(SMALL, SMALL), calibrated=False)


def test_a_work_folder_without_free_space_is_named_with_its_host() -> None:
    full = replace(SMALL, disk_free_bytes=GIB // 4)
    with pytest.raises(UserError, match=r"work folder of n1 has 0\.25 GiB free") as caught:
        plan_for_hosts(settings.build({"global_batch_size": 4}), hosts(SMALL, full), calibrated=False)
    assert "FINETUNE_WORK_DIR" in caught.value.advice


CODESTRAL = {
    "model": "codestral",
    "method": "full",
    "engine": "deepspeed",
    "zero": {"stage": 3, "offload": "cpu"},
}
ONE_GPU = replace(LARGE, gpus=(("NVIDIA L4", hardware.gpu("l4").vram_bytes),))


@pytest.mark.parametrize(
    ("values", "machine"),
    [
        ({"model": "llama-70b", "method": "full", "global_batch_size": 32}, LARGE),
        (CODESTRAL, ONE_GPU),
        ({"model": "llama-8b", "method": "lora", "seq_len": 8192, "micro_batch_size": 8}, ONE_GPU),
        ({"model": "tiny-llama", "engine": "torchtune", "zero": {"stage": 3}}, SMALL),
        (
            {"model": "mixtral-8x7b", "method": "lora", "engine": "torchtune"},
            replace(LARGE, ram_bytes=4000 * GIB),
        ),
    ],
)
def test_every_advised_option_is_an_option_of_python_m_launchers(
    values: dict[str, Any], machine: Machine
) -> None:
    """The same settings can be planned with the options of each suggestion."""
    with pytest.raises(UserError) as caught:
        plan_for_hosts(settings.build(values), hosts(machine), calibrated=False)
    option = r"--[a-z-]+(?: (?!-)[\w.-]*\w)? ?"
    offered = re.findall(rf"((?:{option})+)((?:, without --[a-z-]+)*)", caught.value.advice)
    assert offered, caught.value.advice
    if find_spec("liger_kernel") is None:  # a plan with it ends with how to install it
        offered = [each for each in offered if "--liger" not in each[0]]
    for offered_options, removed in offered:
        overrides = translate(shlex.split(offered_options), (), ())[1::2]
        overrides += [f"{setting_options()[name]}=" for name in re.findall(r"--[a-z-]+", removed)]
        better = settings.build(values, overrides)
        assert plan_for_hosts(better, hosts(machine), calibrated=False)


def test_each_start_is_a_new_attempt_of_its_run_and_changed_settings_are_a_new_run(
    dataset: Path, tmp_path: Path
) -> None:
    def start(**changes: object) -> Start:
        values = {"dataset": str(dataset), "global_batch_size": 4, "seq_len": 64, **changes}
        return prepare_start(settings.build(values), hosts(SMALL), tmp_path, cache=None, calibrated=False)

    first, second, other = start(), start(keep_checkpoints=3), start(method="lora")
    assert [start.attempt for start in (first, second, other)] == [0, 1, 2]
    assert first.key == second.key != other.key
    assert first.secret != second.secret
    assert (first.model_dir / "config.json").exists()
    assert Start.from_json(first.to_json()) == first


def test_a_batch_above_the_number_of_packed_rows_is_refused_with_the_largest_batch(
    dataset: Path, tmp_path: Path
) -> None:
    values = {"dataset": str(dataset), "packing": True, "seq_len": 128}
    with pytest.raises(UserError, match=r"16 is more than the \d+ sequences after packing") as refused:
        prepare_start(settings.build(values), hosts(SMALL), tmp_path, cache=None, calibrated=False)
    assert re.fullmatch(r"Use --global-batch-size \d+ or less, or more data\.", refused.value.advice), (
        refused.value.advice
    )


def test_only_one_job_at_a_time_writes_into_an_output_folder(tmp_path: Path) -> None:
    folder = tmp_path / "out" / "run"
    folder.mkdir(parents=True)
    with Ownership(folder, "7"):
        with pytest.raises(UserError, match="Job 7 is writing into"), Ownership(folder, "8"):
            pass
        with Ownership(folder, "7"):  # requeued before its other start was cleaned up
            pass
    with Ownership(folder, "8"):
        os.utime(folder / "owner.json", (0, 0))
        with Ownership(folder, "9"):  # the one before has given no sign of life for long
            pass
    assert not list(folder.iterdir())


def test_only_one_of_two_jobs_that_start_at_once_gets_the_output_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_other, both = Ownership._active_owner, threading.Barrier(2)

    def slow_look(self: Ownership) -> str | None:
        owner = find_other(self)
        time.sleep(0.5)  # both have looked before one writes
        return owner

    def begin(job: str) -> bool:
        both.wait(60)
        try:
            with Ownership(tmp_path, job):
                both.wait(60)
        except UserError:
            both.wait(60)
            return False
        return True

    monkeypatch.setattr(Ownership, "_active_owner", slow_look)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(begin, ("7", "8"))) == [False, True]
