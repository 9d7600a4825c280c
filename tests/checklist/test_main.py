"""``python -m checklist`` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from checklist import past_runs
from checklist.__main__ import _write_result, app
from checklist.checks.gpu import gpus_probe
from checklist.measurements import PHASES
from checklist.outputs.webhook import URL_VARIABLE
from checklist.result import read
from checklist.run.control import Limits
from checklist.run.rendezvous import NO_SECRET
from checklist.verdict import judge
from estimator.errors import UserError
from tests.checklist.clusters import Cluster
from tests.checklist.runs import collective, gpu_run, with_pairs
from tests.checklist.servers import Api, hook, kubeconfig, nodes_api

ROOT = Path(__file__).resolve().parents[2]
NO_GPUS = (
    "--gpus-per-node 64 is more than" if gpus_probe.list_gpus().uuids else "There is no GPU on this machine."
)
_LAUNCHER = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_STEP_ID",
)


def environment(**variables: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
    return {**inherited, "PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true", **variables}


def checklist(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "checklist", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=environment(**variables),
    )


def of_this_run(marker: str) -> list[int]:
    """Return living processes with the marker in their environment."""
    lines_of_run = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"CHECKLIST_JOB={marker}".encode() not in (entry / "environ").read_bytes():
                    continue
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    lines_of_run.append(int(entry.name))
            except OSError:
                continue
    return lines_of_run


@pytest.mark.slow
def test_without_options_two_local_nodes_are_measured_and_a_verdict_is_printed(tmp_path: Path) -> None:
    done = checklist("--json", str(tmp_path / "out.json"))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS:" in done.stdout
    result = read(tmp_path / "out.json")
    assert result.verdict == "PASS"
    statuses = {phase.name: phase.status for phase in result.measurements.phases}
    assert statuses == {**dict.fromkeys(PHASES, "done"), "diag": "skipped"}


@pytest.mark.slow
def test_under_torchrun_all_processes_join_one_job_and_one_publishes(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "checklist"]
    history = tmp_path / "history.jsonl"
    options = ["--only", "ranks,correctness", "--device", "cpu", "--json", str(tmp_path / "out.json")]
    options += ["--node-name", "rack-7", "--cluster", "prod", "--webhook", "--history", str(history)]
    with hook() as (url, received):
        done = subprocess.run(
            [sys.executable, *command, *options],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            cwd=ROOT,
            env=environment(GLOO_SOCKET_IFNAME="lo", **{URL_VARIABLE: url}),
        )

    assert done.returncode == 0, done.stdout + done.stderr
    result = read(tmp_path / "out.json")
    assert len(result.measurements.facts) == 2
    assert (result.measurements.nodes, result.nodes) == ((0,), ("rack-7",))
    assert [message["text"][:39] for message in received] == ["Checklist of prod: PASS. Software works"]
    assert len(history.read_text().splitlines()) == 1


@pytest.mark.slow
def test_every_rank_exits_with_the_status_of_rank_0_which_alone_reads_the_history(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    broken = collective("all_reduce", 1024, 1.0, 16, 2, error="it broke")
    past_runs.append(judge(gpu_run(collectives=(broken,))), history)  # of no node, so that it concerns any
    port = str(20_000 + os.getpid() % 9_000)
    command = [sys.executable, "-m", "checklist", "--only", "ranks", "--device", "cpu", "--history"]
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [*command, str(history) if rank == 0 else "/only/where/rank/0/is.jsonl"],
            env=environment(RANK=str(rank), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo", **job),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        output = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1], output
    assert "Still open from an earlier run" in output[0]
    assert output[1] == ""


@pytest.mark.slow
def test_no_option_is_a_prefix_of_a_torchrun_option() -> None:
    from torch.distributed.run import get_args_parser

    theirs = [name for action in get_args_parser()._actions for name in action.option_strings]
    ours = [name for option in typer.main.get_command(app).params for name in option.opts]
    assert len(ours) > 20
    assert [name for name in ours if any(other.startswith(name) for other in theirs)] == []


@pytest.mark.slow
def test_a_node_with_an_open_failure_of_an_earlier_run_is_tainted_on_request(tmp_path: Path) -> None:
    history = tmp_path / "history.jsonl"
    share = {2: 0.25}
    past_runs.append(
        judge(with_pairs(gpu_run(8), Cluster(nodes=8, speed=45, transmit=share, receive=share))), history
    )
    api = Api(8)
    options = ("--only", "ranks", "--device", "cpu", "--history", str(history), "--taint")
    with nodes_api(api) as url:
        file = str(kubeconfig(tmp_path, url))
        dry = checklist(*options, KUBECONFIG=file)
        assert "host-2: would be marked as unfit (taint), but this is a dry run." in dry.stdout
        assert api.marked() == []
        done = checklist(*options, "--apply", "--context", "c", KUBECONFIG=file)

    assert "host-2: marked as unfit (taint)." in done.stdout
    assert api.marked() == ["host-2"]


def test_a_result_that_cannot_be_written_is_saved_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _write_result(judge(gpu_run()), tmp_path / "gone" / "out.json")
    output = capsys.readouterr().err
    assert "out.json: No such file or directory. It is in " in output
    assert read(Path(output.split(" It is in ")[1].split(" instead")[0])).verdict == "PASS"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--only", "gem"), "There is no check 'gem'.\nDid you mean gemm?"),
        (("--device", "cuda", "--gpus-per-node", "64"), NO_GPUS),
        (("--reference-settings", "/nowhere/right.json"), "The result /nowhere/right.json cannot be read:"),
        (("--device", "cpu", "--reference-node", "h9"), "--reference-node h9 needs several hosts;"),
        (("--json", "/nowhere/out.json"), "/nowhere/out.json cannot be written."),
        (("--datastore", "gs://bucket"), "The datastore 'gs://bucket' cannot be measured."),
        (("--history", "README.md"), "--history README.md is not a history of the checklist"),
        (("--taint", "--label"), "--taint and --label exclude each other."),
        (("--node-name", "rack-7"), "--node-name names one host, and all nodes of this run are local."),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_impossible_options_are_refused_in_one_line_with_exit_status_2(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], line: str
) -> None:
    for name in _LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    monkeypatch.setenv(URL_VARIABLE, "")
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert line in done.stderr
    assert isinstance(done.exception, SystemExit)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    # processes end with their parent, for which SIGTERM is as good as SIGKILL
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly), signal.SIGINT],
)
def test_no_process_remains_after_a_run_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    marker = f"{how.name}-{os.getpid()}-{tmp_path.name}"
    # A shell's background jobs ignore a Ctrl-C, and so would this if pytest were one
    command = ["env", "--default-signal=INT", sys.executable, "-m", "checklist", "--keep", str(tmp_path)]
    process = subprocess.Popen(
        command,
        env=environment(CHECKLIST_JOB=marker),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 180
    while len(of_this_run(marker)) < 4 and time.monotonic() < deadline:  # two nodes, two workers
        time.sleep(0.05)
    assert len(of_this_run(marker)) == 4
    process.send_signal(how)
    _, output = process.communicate(timeout=120)
    if how == signal.SIGINT:
        assert (process.returncode, output) == (130, "Ended by Ctrl-C, without a verdict.\n")

    deadline = time.monotonic() + 60
    while of_this_run(marker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert of_this_run(marker) == []


def test_a_rank_without_rank_0_ends_and_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no-such-host", "MASTER_PORT": "29500"}
    monkeypatch.setattr("checklist.run.node_agent.limits_of", lambda _: Limits(rendezvous=0.5))
    done = CliRunner().invoke(app, [], env=launcher)
    assert done.exit_code == 2
    assert "no-such-host, ports 29517 to 29524" in done.stderr


@pytest.mark.parametrize("secret", ["", "of this job"])
def test_a_launched_run_without_a_secret_prints_a_warning(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    def measure(*_: object) -> int:
        raise UserError("Nothing is measured here.", "")

    monkeypatch.setattr("checklist.__main__._measure", measure)
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500", "CHECKLIST_SECRET": secret}
    done = CliRunner().invoke(app, ["--device", "cpu"], env=launcher)
    assert (NO_SECRET in done.stderr) == (not secret)
    assert "Nothing is measured here." in done.stderr
