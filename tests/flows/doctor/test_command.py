"""``finetune doctor`` as a user calls it: text, JSON, exit status, and no secrets or leftovers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from estimator.cli.app import app as finetune
from flows.doctor.command import obstacles_of
from flows.doctor.line import Line
from flows.doctor.probes import PROBES, Probe
from tests.estimator.hardware.cluster.test_machines import write_kubeconfig
from tests.flows.conftest import environment
from tests.flows.doctor.test_tokens import VALUES

ROOT = Path(__file__).parents[3]
ALL = ",".join(probe.name for probe in PROBES)
# The command, with the probes that its first argument names
CODE = """
import sys
from estimator.cli.app import main
from flows.doctor import probes
names = sys.argv.pop(1).split(",")
probes.PROBES = tuple(probe for probe in probes.PROBES if probe.name in names)
main()
"""


def variables(home: Path) -> dict[str, str]:
    fixed = {"HOME": str(home), "PYTHONPATH": str(ROOT), "AWS_EC2_METADATA_DISABLED": "true", **VALUES}
    return environment(home, **{**fixed, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"})


@pytest.mark.parametrize(
    "probes",
    [
        pytest.param("packages,engines,datastore,metadata,local,tokens", marks=pytest.mark.slow),
        pytest.param(ALL, marks=[pytest.mark.slow, pytest.mark.nightly]),
    ],
)
def test_doctor_reports_a_runnable_default_job_in_json_with_status_0(tmp_path: Path, probes: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, probes, "doctor", "--json"],
        cwd=tmp_path,
        env=variables(tmp_path),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    for value in VALUES.values():
        assert value not in done.stdout + done.stderr
    answer = json.loads(done.stdout)
    lines = {line["check"]: line for line in reversed(answer["lines"])}
    assert (done.returncode, answer["default_job"]) == (0, True), done.stdout
    usable = {"torchtune", "deepspeed", "fsdp2", "local", "datastore"}
    assert {lines[name]["state"] for name in usable} == {"ok"}
    assert lines["local"]["found"].startswith("tiny-llama, full with torchtune on")
    assert {line["section"] for line in answer["lines"]} >= {"Installed", "Backends", "Tokens"}
    assert set(answer["lines"][0]) == {"section", "check", "state", "found", "fix"}
    assert list(tmp_path.iterdir()) == []


def test_doctor_reports_obstacles_with_status_1_within_80_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = Line(check="local", state="ok", found="tiny-llama " * 20, needs=("datastore",))
    datastore = Line(check="datastore", state="no", found="local, a file", fix="Set the root. " * 20)
    probe = Probe(name="backends", section="Backends", function="", limit_s=1)
    monkeypatch.setattr("flows.doctor.processes.run_probes", lambda *_: [(probe, [datastore, local])])
    done = CliRunner().invoke(finetune, ["doctor"], env={"COLUMNS": "80"})
    assert done.exit_code == 1
    rows = [row.rstrip() for row in done.stdout.splitlines()]
    assert max(map(len, rows)) <= 80
    assert "\x1b" not in done.stdout
    assert rows[-1] == "The default job cannot run here: datastore (see above)."
    (row,) = (row for row in rows if row.split()[:3] == ["no", "Backends", "datastore"])
    assert "local," in row
    assert any("fix: Set the root." in row for row in rows)


def test_only_requirements_of_the_default_job_decide_the_exit_status() -> None:
    local = Line(check="local", state="ok", found="", needs=("fsdp2", "datastore"))
    engine, other = (Line(check=name, state="no", found="") for name in ("fsdp2", "trl"))
    unknown = Line(check="datastore", state="unknown", found="")
    assert obstacles_of([other, local]) == []
    assert obstacles_of([other, engine, unknown, local]) == [engine, unknown]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=[pytest.mark.slow, pytest.mark.nightly]), signal.SIGTERM]
)
def test_an_interrupted_doctor_leaves_no_process(number: signal.Signals, tmp_path: Path) -> None:
    write_kubeconfig(tmp_path, training="https://127.0.0.1:9")
    config = json.loads((tmp_path / ".kube" / "config").read_text())
    login = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sleep", "args": ["86398"]}
    config["users"] = [{"name": "u", "user": {"exec": {**login, "interactiveMode": "Never"}}}]
    (tmp_path / ".kube" / "config").write_text(json.dumps(config))
    with subprocess.Popen(
        [sys.executable, "-c", CODE, "kubernetes", "doctor"],
        cwd=tmp_path,
        env=variables(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as doctor:
        deadline = time.monotonic() + 120
        while not _is_running("sleep", "86398") and time.monotonic() < deadline:
            time.sleep(0.1)
        assert _is_running("sleep", "86398")
        children = psutil.Process(doctor.pid).children(recursive=True)
        doctor.send_signal(number)
        doctor.communicate(timeout=30)
    assert doctor.returncode in (130, 143)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not _is_running("sleep", "86398")


def _is_running(*arguments: str) -> bool:
    return any(each.info["cmdline"] == list(arguments) for each in psutil.process_iter(["cmdline"]))
