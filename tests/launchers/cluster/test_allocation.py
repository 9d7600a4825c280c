"""Node addresses read from the variables of Slurm, PBS, OpenMPI and torchrun."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.cluster import allocation
from launchers.cluster.allocation import FIRST_PORT, expand_hosts, node_address
from launchers.cluster.endpoint import Secret

# srun --ntasks-per-node=1 on the third of four nodes, from sbatch --mem=480G --nodes=4, started again once
SLURM = {
    "SLURM_JOB_ID": "81234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_NODELIST": "gpu[03-05,9]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_MEM_PER_NODE": "491520",
    "SLURM_CPUS_ON_NODE": "96",
    "SLURM_RESTART_COUNT": "1",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1.cluster",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "ft-7",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}


LISTS = [
    ("gpu[03-05,9]", ["gpu03", "gpu04", "gpu05", "gpu9"]),
    ("n1", ["n1"]),
    ("n1,n2", ["n1", "n2"]),
    ("login,gpu[1-2],x[007-008].site", ["login", "gpu1", "gpu2", "x007.site", "x008.site"]),
    ("rack[1-2]n[0-1]", ["rack1n0", "rack1n1", "rack2n0", "rack2n1"]),
    ("a[01-03,7],b[1-2]c", ["a01", "a02", "a03", "a7", "b1c", "b2c"]),
    (
        "x[1-2]-[3,5-6].site,y",
        ["x1-3.site", "x1-5.site", "x1-6.site", "x2-3.site", "x2-5.site", "x2-6.site", "y"],
    ),
    ("a-b[098-101]", ["a-b098", "a-b099", "a-b100", "a-b101"]),
    ("a[8-11]", ["a8", "a9", "a10", "a11"]),
    ("", []),
]


@pytest.mark.parametrize("scontrol", [True, False], ids=["with scontrol", "without"])
@pytest.mark.parametrize(("nodelist", "hosts"), LISTS)
def test_a_compressed_slurm_node_list_is_expanded(
    nodelist: str, hosts: list[str], scontrol: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scontrol and shutil.which("scontrol"):
        (tmp_path / "slurm.conf").write_text("ClusterName=x\nSlurmctldHost=localhost\n")
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert expand_hosts(nodelist) == hosts


@pytest.mark.parametrize("does", ["sleep 60", "echo stranger; exit 1", "echo not a host", "true"])
def test_a_node_list_is_expanded_within_the_time_limit_if_scontrol_hangs_or_fails(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{does}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(allocation, "SCONTROL_S", 0.5)
    begin = time.monotonic()
    assert expand_hosts("rack[1-2]n[0-1]") == ["rack1n0", "rack1n1", "rack2n0", "rack2n1"]
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("nodelist", ["n[a-b]", "n[3-1]", "n[1", "n1]", "n[]", "n[[1]]"])
def test_an_invalid_list_of_nodes_is_refused(
    nodelist: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST") as caught:
        expand_hosts(nodelist)
    assert repr(nodelist) in caught.value.problem


def test_an_srun_task_reads_its_node_number_and_memory_from_the_environment() -> None:
    place = node_address(SLURM)
    assert (place.scheduler, place.node, place.nodes, place.main_host) == ("slurm", 2, 4, "gpu03")
    assert (place.memory_bytes, place.job, place.attempt) == (480 * 2**30, "81234", "1.0")


def test_tasks_of_one_job_use_the_same_ports_and_other_jobs_use_other_ports() -> None:
    first, other = node_address({**SLURM, "SLURM_NODEID": "0"}), node_address(SLURM)
    assert first.ports == other.ports
    assert first.address(Secret("s"), "gang").run == other.address(Secret("s"), "gang").run
    assert first.address(Secret("s"), "gang").run != other.address(Secret("s"), "rendezvous").run
    assert first.address(Secret("s"), "gang").secret != other.address(Secret("t"), "gang").secret
    requeued = node_address({**SLURM, "SLURM_RESTART_COUNT": "2"})
    assert first.address(Secret("s"), "gang").run != requeued.address(Secret("s"), "gang").run
    assert not set(first.ports) & set(node_address({**SLURM, "SLURM_JOB_ID": "81235"}).ports)
    assert min(first.ports) >= FIRST_PORT


def test_memory_per_cpu_is_summed_and_a_request_for_all_memory_is_unknown() -> None:
    without = {name: value for name, value in SLURM.items() if name != "SLURM_MEM_PER_NODE"}
    assert node_address({**without, "SLURM_MEM_PER_CPU": "1024"}).memory_bytes == 96 * 2**30
    assert node_address({**SLURM, "SLURM_MEM_PER_NODE": "0"}).memory_bytes is None


@pytest.mark.parametrize("tasks", ["8(x4)", "1,2(x3)", "2"])
def test_several_tasks_on_one_node_are_refused(tasks: str) -> None:
    with pytest.raises(UserError, match="several processes") as caught:
        node_address({**SLURM, "SLURM_STEP_TASKS_PER_NODE": tasks})
    assert "--ntasks-per-node=1" in caught.value.advice


def test_a_batch_script_without_srun_is_refused_for_several_nodes() -> None:
    batch = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2"}
    with pytest.raises(UserError, match="2 nodes") as caught:
        node_address(batch)
    assert "srun" in caught.value.advice
    alone = node_address({**batch, "SLURM_JOB_NUM_NODES": "1", "SLURM_MEM_PER_NODE": "1024"})
    assert (alone.nodes, alone.main_host, alone.memory_bytes) == (1, "127.0.0.1", 2**30)


def test_one_torchrun_process_per_node_reads_its_node_number_from_the_environment() -> None:
    place = node_address(TORCHRUN)
    assert (place.node, place.nodes, place.main_host, place.job) == (1, 2, "n1.cluster", "ft-7")
    assert 29500 not in place.ports, "torchrun's own store listens there"
    assert node_address({**SLURM, **TORCHRUN}).scheduler == "torchrun", "the nearer launcher wins"


def test_one_torchrun_process_per_gpu_is_refused() -> None:
    with pytest.raises(UserError, match="several processes"):
        node_address({**TORCHRUN, "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"})


def test_mpiexec_under_pbs_takes_the_first_host_of_the_node_file(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("x1001c0\nx1001c0\nx1002c1\n")
    place = node_address({**OPENMPI, "PBS_JOBID": "4711.pbs", "PBS_NODEFILE": str(nodes)})
    assert (place.scheduler, place.node, place.nodes, place.main_host) == ("pbs", 1, 2, "x1001c0")


def test_mpiexec_without_a_host_list_needs_the_name_of_the_first_host() -> None:
    with pytest.raises(UserError, match="host of process 0"):
        node_address(OPENMPI)
    assert node_address({**OPENMPI, "MASTER_ADDR": "a1"}).main_host == "a1"


def test_variables_of_mpich_and_its_derivatives_are_read() -> None:
    hydra = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MASTER_ADDR": "a1"}
    assert (node_address(hydra).node, node_address(hydra).nodes) == (0, 2)
    with pytest.raises(UserError, match="several processes"):
        node_address({**hydra, "MPI_LOCALNRANKS": "2"})


def test_under_pbsdsh_a_host_finds_its_own_name_in_the_node_file(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("b2.site\nb2.site\nb3.site\n")
    environment = {"PBS_JOBID": "99[3].server", "PBS_NODEFILE": str(nodes)}
    assert node_address(environment, hostname="b3").node == 1
    assert node_address(environment, hostname="b2.site").main_host == "b2.site"
    with pytest.raises(UserError, match="b9 is not one of"):
        node_address(environment, hostname="b9")


def test_an_error_advises_a_shared_folder_if_the_pbs_node_file_is_missing_on_a_node(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read on b3") as caught:
        node_address({"PBS_JOBID": "1", "PBS_NODEFILE": str(tmp_path / "none")}, hostname="b3")
    assert "shared folder" in caught.value.advice


def test_without_a_scheduler_there_is_one_node() -> None:
    place = node_address({})
    assert (place.scheduler, place.nodes) == ("none", 1)
    assert node_address({}).attempt == place.attempt


@pytest.mark.parametrize(
    "environment",
    [
        {**SLURM, "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu03"},
        {**OPENMPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "MASTER_ADDR": "a1"},
    ],
)
def test_a_single_node_job_of_a_scheduler_uses_the_loopback_address(environment: dict[str, str]) -> None:
    place = node_address(environment)
    assert (place.node, place.nodes, place.main_host) == (0, 1, "127.0.0.1")


def test_an_environment_variable_that_is_not_a_number_is_named() -> None:
    with pytest.raises(UserError, match="SLURM_NODEID is 'two'"):
        node_address({**SLURM, "SLURM_NODEID": "two"})
