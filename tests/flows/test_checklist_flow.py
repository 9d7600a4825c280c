"""The checklist flow as a user runs it: two nodes on this machine, the verdict, the past, what is refused."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import yaml

from checklist import result as results
from checklist.measurements import Hang, Phase
from checklist.options import help_of, json_schema
from checklist.probes.progress import Progress
from checklist.verdict import judge
from estimator.errors import UserError
from flows import checklist_launch, checklist_steps
from flows.checklist_launch import DEFAULTS, Launch, ask, resolve
from tests.checklist.runs import gpu_run
from tests.flows.conftest import environment, left_behind

FLOW = Path(__file__).parents[2] / "flows" / "checklist_flow.py"
EARLIER = Path(__file__).parent / "flows" / "earlier_checks.py"
KEPT = ".metaflow/ChecklistFlow/finetune/runs/*"  # what a run keeps while it measures
BUSY_SECONDS = 480  # a run takes less than 60 on a machine that does nothing else
FLOOR = "system,op,floor,source\nhere,gemm_fp32,1000000,no processor is that fast\n"
_READ = """
import pickle, sys
from metaflow import Run, namespace
namespace(None)
run = Run(sys.argv[1])
data = run["verdict"].task.data
found = {name: getattr(data, name) for name in ("result", "healthy_nodes", "bad_nodes", "cluster", "kept")}
sys.stdout.buffer.write(pickle.dumps(found | {"successful": run.successful}))
"""
_READ_PAST = """
import pickle, sys
from metaflow import get_namespace, namespace
from flows.checklist_steps import read_past_runs
namespace("user:somebody")
past = read_past_runs("ChecklistFlow", sys.argv[1], "none")
assert get_namespace() == "user:somebody", get_namespace()
sys.stdout.buffer.write(pickle.dumps(past))
"""


@dataclass
class Run:
    """A run that has ended."""

    home: Path
    status: int
    output: str
    seconds: float

    @property
    def text(self) -> str:
        """What was said, without Metaflow's prefixes and line breaks."""
        lines = (re.sub(r"^\S+ \S+ \[[^]]*\] ", "", line) for line in self.output.splitlines())
        return " ".join(" ".join(lines).split())

    @property
    def run_id(self) -> str:
        found = re.search(r"run-id (\d+)", self.output)
        assert found is not None, self.output
        return found[1]

    def artifacts(self) -> dict[str, Any]:
        return dict(_python(self.home, _READ, f"ChecklistFlow/{self.run_id}"))

    def card(self) -> str:
        """The content of the card's page."""
        page = self.home / f"{self.run_id}.html"
        words = ("card", "get", f"{self.run_id}/verdict", str(page), "--id", "checklist")
        done = _flow(self.home, *words)
        assert page.exists(), done.output
        data = re.search(r'__MF_DATA__\["[^"]+"\] = "([^"]+)"', page.read_text())
        assert data is not None
        return base64.b64decode(data[1]).decode()


def _flow(home: Path, *arguments: str, **more: str) -> Run:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(FLOW), *arguments],
        cwd=home,
        env=environment(home, AWS_EC2_METADATA_DISABLED="true", **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUSY_SECONDS,
        check=False,
    )
    assert left_behind(home) == []
    return Run(home=home, status=done.returncode, output=done.stdout, seconds=time.monotonic() - began)


def _python(home: Path, code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=home,
        env=environment(home, PYTHONPATH=str(FLOW.parents[1])),
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    return pickle.loads(done.stdout)  # noqa: S301


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checklist")
    (folder / "thresholds.csv").write_text(FLOOR)
    return folder


@pytest.fixture(scope="module")
def first(home: Path) -> Run:
    """A run with no options."""
    return _flow(home, "run")


@pytest.fixture(scope="module")
def second(home: Path, first: Run) -> Run:
    """A later run, whose own thresholds no machine can reach."""
    return _flow(home, "run", "--thresholds", "thresholds.csv", "--system", "here", "--json", "second.json")


@pytest.fixture(scope="module")
def third(home: Path, second: Run) -> Run:
    """A run on one node that does not ask what the second one has failed."""
    return _flow(home, "run", "--nodes", "1", "--gpus-per-node", "2", "--skip", "gemm,hbm,storage,datastore")


def test_a_run_with_no_options_ends_with_a_verdict_a_card_and_a_result(
    first: Run, record_property: Callable[[str, object], None]
) -> None:
    record_property("seconds", round(first.seconds, 1))
    assert first.status == 0, first.output
    found = first.artifacts()
    result = checklist_steps.from_plain(found["result"])
    assert result.verdict in ("PASS", "WARN")
    assert f"{result.verdict}: " in first.text
    assert len(result.nodes) == 2
    assert result.check("mesh").verdict == "PASS"  # type: ignore[union-attr]
    assert result.check("correctness").verdict == "PASS"  # type: ignore[union-attr]
    assert result.check("datastore").measured  # type: ignore[union-attr]
    assert found["healthy_nodes"] == list(result.nodes)
    assert found["bad_nodes"] == []
    assert found["cluster"].startswith("local:")
    assert results.read(first.home / "checklist-result.json").verdict in ("PASS", "WARN", "FAIL")
    assert "checklist-result.json" in first.output
    assert result.headline.split(".")[0] in first.card()


@pytest.mark.slow
def test_a_result_is_exactly_what_the_file_says(second: Run) -> None:
    found = second.artifacts()
    assert json.loads((second.home / "second.json").read_text()) == found["result"]


@pytest.mark.slow
def test_a_fail_ends_the_flow_after_all_is_stored_with_one_clear_line(second: Run) -> None:
    assert second.status != 0
    assert "Traceback" not in second.output, second.output
    assert "FAIL: gemm_fp32 of all 2 ranks is below the floor" in second.text
    found = second.artifacts()
    assert not found["successful"]
    assert found["result"]["verdict"] == "FAIL"
    assert "not fit to train on" in second.card()


@pytest.mark.slow
def test_a_later_run_knows_of_the_earlier_ones(second: Run, third: Run) -> None:
    assert any("1 earlier run of local:" in note for note in second.artifacts()["result"]["notes"])
    notes = third.artifacts()["result"]["notes"]
    assert any("2 earlier runs" in note and "1 failures still open" in note for note in notes)


@pytest.mark.slow
def test_a_failure_stands_until_the_same_check_passes(third: Run) -> None:
    assert third.status != 0
    found = third.artifacts()["result"]
    assert len(found["nodes"]) == 1
    assert {check["check"]: check["verdict"] for check in found["checks"]}["correctness"] == "PASS"
    assert [item["check"] for item in found["standing"]] == ["gemm"]
    assert "Still open from an earlier run" in third.text
    assert "--only gemm" in third.text


@pytest.mark.slow
def test_a_node_whose_process_is_killed_is_named_and_the_verdict_still_comes(tmp_path: Path) -> None:
    run = _hurt(
        tmp_path, lambda _: os.kill(_supervisor(tmp_path, node=1), signal.SIGKILL), "--op-timeout", "20"
    )
    assert run.status != 0
    found = run.artifacts()["result"]
    assert found["verdict"] == "FAIL", run.output
    assert found["bad_nodes"] == ["local1"], run.output
    assert any("was ended by signal 9" in note for note in found["notes"])
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_step_that_is_lost_is_judged_by_what_its_nodes_had_measured(tmp_path: Path) -> None:
    kept: list[Path] = []

    def hurt(_: subprocess.Popen[bytes]) -> None:
        kept.append(_until(lambda: next(tmp_path.glob(f"{KEPT}/measured.json"), None)))
        os.kill(psutil.Process(_supervisor(tmp_path, node=0)).ppid(), signal.SIGKILL)

    run = _hurt(tmp_path, hurt)
    assert run.status != 0
    found = run.artifacts()["result"]
    assert found["verdict"] == "NO-VERDICT", run.output
    assert len(found["nodes"]) == 2, "the facts were measured by then"
    assert "A pod or container of the nodes' step did not come to its end" in found["headline"]
    assert json.loads(kept[0].read_text())["facts"] == found["measurements"]["facts"]
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_ctrl_c_ends_a_run_at_once_and_resume_goes_on(tmp_path: Path) -> None:
    def interrupt(process: subprocess.Popen[bytes]) -> None:
        _supervisor(tmp_path, node=0)
        os.killpg(process.pid, signal.SIGINT)

    run = _hurt(tmp_path, interrupt)
    assert run.status != 0
    assert "Workflow interrupted" in run.text
    assert "Traceback" not in run.output
    resumed = _flow(tmp_path, "resume", "--origin-run-id", run.run_id)
    assert resumed.status == 0, resumed.output
    assert resumed.artifacts()["result"]["verdict"] in ("PASS", "WARN")


def _hurt(home: Path, hurt: Callable[[subprocess.Popen[bytes]], None], *options: str) -> Run:
    """A run to which that is done; it ends, and leaves no process."""
    # A shell's background jobs ignore a Ctrl-C, and so would this if pytest were one
    command = ["env", "--default-signal=INT", sys.executable, str(FLOW), "run", *options]
    began = time.monotonic()
    with (home / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=home,
            env=environment(home, AWS_EC2_METADATA_DISABLED="true"),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # as in a terminal of its own
        )
        try:
            hurt(process)
            status = process.wait(BUSY_SECONDS)
        finally:
            process.kill()
            process.wait()
    assert left_behind(home) == []
    output, seconds = (home / "log").read_text(), time.monotonic() - began
    return Run(home=home, status=status, output=output, seconds=seconds)


def _until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + BUSY_SECONDS / 2
    while time.monotonic() < deadline:
        if (value := found()) is not None:
            return value
        time.sleep(0.02)
    raise AssertionError("it did not come")


def _supervisor(home: Path, node: int) -> int:
    """The process that looks after that node's ranks, once they have told who they are."""
    deadline = time.monotonic() + BUSY_SECONDS / 2
    while time.monotonic() < deadline:
        told = [Progress(file).read().operation for file in home.glob(f"work/*/rank{node}.progress")]
        if told and told[0] not in ("", "facts", "health", "clock"):
            return next(process.pid for process in psutil.process_iter() if _looks_after(process, home, node))
        time.sleep(0.02)
    raise AssertionError("no supervisor has started")


def _looks_after(process: psutil.Process, home: Path, node: int) -> bool:
    try:
        said = process.environ() if "checklist.run.local" in process.cmdline() else {}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
    if said.get("FINETUNE_WORK_DIR") != str(home / "work"):
        return False
    return said["CHECKLIST_LOCAL_NODE"] == str(node)


@pytest.mark.slow
def test_only_what_is_of_this_cluster_and_schema_is_read_of_the_past(tmp_path: Path) -> None:
    good = checklist_steps.summarise(judge(gpu_run(2)))
    wrong = gpu_run(2, started_unix=2_000.0, probes=())
    failed = checklist_steps.summarise(judge(wrong))
    newer = {**good, "version": 99}
    for name, kept, cluster in (
        ("good", good, "here"),
        ("elsewhere", good, "there"),
        ("newer", newer, "here"),
        ("failed", {**failed, "verdict": "FAIL"}, "here"),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
        words = ["run", "--kept-file", str(tmp_path / f"{name}.json"), "--of-cluster", cluster]
        subprocess.run(
            [sys.executable, str(EARLIER), *words],
            cwd=tmp_path,
            env=environment(tmp_path),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=name != "failed",
            timeout=120,
        )
    past = _python(tmp_path, _READ_PAST, "here")
    assert [run.verdict for run in past.runs] == ["FAIL", good["verdict"]]
    assert len(past.history.records) == len(good["records"]) + len(failed["records"]) > 4
    assert any("2 earlier runs of here" in note for note in past.notes)
    assert any("schema version 99" in note for note in past.notes)


def test_a_cluster_without_earlier_runs_has_no_history(tmp_path: Path) -> None:
    past = _python(tmp_path, _READ_PAST, "here")
    assert past.runs == ()
    assert past.notes == ("History: 0 earlier runs of here, 0 figures, 0 failures still open.",)


def test_a_run_of_which_nothing_came_back_has_no_verdict_and_says_why() -> None:
    run_config = _run_config()
    measured = checklist_steps.merge(run_config, [(1, None, "it was killed"), (0, None, "no port is free")])
    result = checklist_steps.judge_run(run_config, measured, checklist_steps.PastRuns())
    assert result.verdict == "NO-VERDICT"
    assert "Node 0: no port is free" in result.headline
    assert checklist_steps.from_plain(checklist_steps.to_plain(result)) == result
    refusal = checklist_steps.explain_refusal(result)
    assert refusal is not None
    assert refusal.problem.startswith("NO-VERDICT: ")


def test_a_lost_step_is_judged_by_what_was_kept_and_its_lost_node_is_named_but_not_blamed() -> None:
    launch = Launch(backend="kubernetes", gpus_per_node=8, thresholds=None, thresholds_file="")
    run_config = resolve(_options(), launch, datastore="s3://bucket/root")
    lost = Hang(
        rank=8, node=1, phase="world", op="all_reduce", sequence=3, waited_s=1, kind="lost", detail="gone"
    )
    run = gpu_run(2)
    phases = (*run.phases[:3], Phase(name="world", status="failed", reason="node 1 was lost"), run.phases[4])
    kept = replace(run, hangs=(lost,), phases=phases, collectives=(), transport=None)

    told = checklist_steps.judge_run(
        run_config, checklist_steps.merge(run_config, [], kept=kept), checklist_steps.PastRuns()
    )
    assert (told.verdict, told.bad_nodes) == ("FAIL", ("host-1",)), "a step that ended well: it is the node"

    result = checklist_steps.judge_run(
        run_config, checklist_steps.merge(run_config, [], lost=True, kept=kept), checklist_steps.PastRuns()
    )
    assert (result.verdict, result.bad_nodes, result.healthy_nodes) == ("NO-VERDICT", (), ())
    assert "host-1 was lost in all_reduce of phase world" in result.check("hangs").reason  # type: ignore[union-attr]
    assert any("did not come to its end" in note for note in result.notes)
    assert checklist_steps.from_plain(checklist_steps.to_plain(result)) == result

    pod = "pod t-1 on node-b has failed: Evicted: low on memory"
    measured = checklist_steps.merge(run_config, [], lost=True, endings=(pod,))
    nothing = checklist_steps.judge_run(run_config, measured, checklist_steps.PastRuns())
    assert nothing.verdict == "NO-VERDICT"
    assert pod in nothing.headline


# ---- what is refused, and what is asked for


def _values(**given: Any) -> dict[str, Any]:
    return {**DEFAULTS, **given}


def _options(**given: Any) -> checklist_launch.FlowOptions:
    return checklist_launch.options_of(_values(**given))


def _run_config(**given: Any) -> checklist_launch.RunConfig:
    launch = Launch(backend="local", gpus_per_node=None, thresholds=None, thresholds_file="")
    return resolve(_options(device="cpu", **given), launch, datastore="/")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"only": "meshh"}, ["meshh", "Did you mean mesh?"]),
        ({"skip": "pears"}, ["pears", "pairs"]),
        ({"nodes": 0}, ["--nodes 0"]),
        ({"gpus_per_node": 0}, ["--gpus-per-node 0"]),
        ({"profile": "quik"}, ["quik", "quick"]),
        ({"device": "tpu"}, ["tpu", "cuda"]),
        ({"timeout": 0.0}, ["of 0 s"]),
        ({"start_timeout": -1.0}, ["of -1 s", "the start"]),
        ({"thresholds": "missing.csv"}, ["missing.csv", "No such file"]),
        ({"most_share": 2.0}, ["2.0"]),
        ({"pending_timeout": -1.0}, ["--pending-timeout -1.0"]),
        ({"json": "no/such/folder/result.json"}, ["no/such/folder", "--json"]),
        ({"apply": True}, ["--apply", "--taint"]),
        ({"taint": True, "label": True}, ["--taint", "--label"]),
        ({"webhook": True}, ["CHECKLIST_WEBHOOK_URL"]),
        ({"prometheus": "metrics.txt"}, ["metrics.txt", ".prom"]),
    ],
)
def test_what_can_not_be_is_refused_before_a_run(
    given: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CHECKLIST_WEBHOOK_URL", raising=False)
    with pytest.raises(UserError) as refused:
        ask(_values(**{"device": "cpu", **given}), "local", None)
    for word in words:
        assert word in str(refused.value)


def test_more_gpus_than_there_are_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from checklist.probes.gpus import Seen
    from checklist.run import local

    seen = Seen(uuids=("GPU-a", "GPU-b"), names=("H100", "H100"))
    monkeypatch.setattr(local.gpus, "look", lambda: seen)
    with pytest.raises(UserError, match="--gpus-per-node 2 is more than the 1"):
        ask(_values(gpus_per_node=2), "local", None)


def test_the_gpus_of_one_machine_are_shared_out_between_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    from checklist.probes.gpus import Seen
    from checklist.run import local

    seen = Seen(uuids=("GPU-a", "GPU-b", "GPU-c", "GPU-d"), names=("H100",) * 4)
    monkeypatch.setattr(local.gpus, "look", lambda: seen)
    launch = Launch(backend="local", gpus_per_node=None, thresholds=None, thresholds_file="")
    run_config = resolve(_options(), launch, datastore="/")
    assert run_config.shares == (("GPU-a", "GPU-b"), ("GPU-c", "GPU-d"))
    assert (run_config.options.gpus_per_node, run_config.options.device) == (2, "cuda")
    # One GPU can't be two nodes
    monkeypatch.setattr(local.gpus, "look", lambda: Seen(uuids=("GPU-a",), names=("H100",)))
    run_config = resolve(_options(), launch, datastore="/")
    assert (run_config.shares, run_config.options.device) == (((), ()), "cpu")


def test_a_gpu_that_others_use_is_not_loaded_and_that_is_no_pass() -> None:
    run = gpu_run(2)
    why = "the GPU of rank 0 on host-0 is used by 3 other processes"
    phases = tuple(
        replace(phase, status="skipped", reason=why) if phase.name in ("node", "world", "pairs") else phase
        for phase in run.phases
    )
    busy = replace(run, phases=phases, locals=(), collectives=(), pairs=(), health=(), transport=None)
    result = checklist_steps.judge_run(_run_config(), busy, checklist_steps.PastRuns())
    assert result.verdict == "NO-VERDICT"
    assert why in result.headline
    assert why in checklist_steps.explain_refusal(result).problem  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "gpus", "words"),
    [
        ({"device": "cuda"}, None, ["--gpus-per-node 8"]),
        ({"gpus_per_node": 4}, 8, ["--gpus-per-node 4", "gpu=8"]),
        ({"instance_type": "p5.49xlarge"}, None, ["p5.49xlarge", "p5.48xlarge"]),
    ],
)
def test_what_a_cluster_could_not_give_is_refused_before_a_run(
    given: dict[str, Any], gpus: int | None, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        ask(_values(**given), "batch", gpus)
    for word in words:
        assert word in str(refused.value)


def test_a_mistake_is_one_line_and_nothing_is_launched(home: Path) -> None:
    for words in (["--only", "meshh"], ["--thresholds", "missing.csv"]):
        run = _flow(home, "run", *words)
        assert run.status != 0
        assert words[1] in run.text
        assert "Traceback" not in run.output
        assert "Workflow starting" not in run.output


def test_a_mistake_in_the_options_file_is_one_line(home: Path) -> None:
    (home / "options.yaml").write_text("nodess: 3\n")
    run = _flow(home, "--config", "options", "options.yaml", "run")
    assert run.status != 0
    assert "'nodess'. Did you mean nodes?" in run.text
    assert "Traceback" not in run.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nodess: 3", ["'nodess'", "Did you mean nodes?"]),
        ("nodes: two", ["nodes is 'two'", "a whole number"]),
        ("nodes: true", ["nodes is True", "a whole number"]),
        ("timeout: soon", ["timeout is 'soon'", "a number"]),
        ("apply: perhaps", ["apply is 'perhaps'", "true or false"]),
        ("system: 5", ["system is 5", "text"]),
        ("- nodes", ["no mapping"]),
        ("nodes: [", ["no YAML"]),
    ],
)
def test_each_mistake_in_the_options_is_told_with_its_value(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        checklist_launch.read_options(text)
    for word in words:
        assert word in str(refused.value)


def test_the_options_file_is_laid_over_the_defaults() -> None:
    read = checklist_launch.read_options("nodes: 4\nonly: [mesh, pairs]\ntimeout:\n")
    assert (read["nodes"], read["only"], read["timeout"], read["profile"]) == (4, "mesh,pairs", None, "quick")
    assert checklist_launch.read_options("") == DEFAULTS


def test_every_option_is_a_flag_of_the_flow_and_nothing_else_is(home: Path) -> None:
    text = _flow(home, "run", "--help").output
    flags = {"--" + name.replace("_", "-") for name in DEFAULTS}
    assert flags <= set(re.findall(r"--[a-z-]+", text))
    for field in checklist_launch.FlowOptions.model_fields.values():
        assert help_of(field)[:30] in " ".join(text.split())


def test_the_schema_of_the_options_file_is_up_to_date_and_takes_what_the_model_takes() -> None:
    schema = json.loads(checklist_launch.SCHEMA_FILE.read_text())
    assert schema == json_schema(checklist_launch.FlowOptions), "python -m flows.checklist_launch renews it"
    for text in ("nodes: 4\nonly: [mesh, pairs]\ntimeout: 30\n", "only: mesh,pairs\ntaint: true\n"):
        jsonschema.validate(yaml.safe_load(text), schema)
        checklist_launch.read_options(text)
    for text in ("nodess: 3", "nodes: two", "profile: quik", "apply: perhaps"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(text), schema)


def test_a_machine_type_says_how_many_gpus_and_which_network() -> None:
    asked = ask(_values(instance_type="p5.48xlarge", nodes=4), "batch", None)
    assert asked.request.gpus_per_node == 8
    assert asked.request.shared_memory_mib >= 8 * 1024
    assert Launch.unpack(asked.launch).gpus_per_node == 8


def test_a_node_without_the_gpus_it_was_asked_for_is_no_cpu_test_that_passes() -> None:
    launch = Launch(backend="kubernetes", gpus_per_node=8, thresholds=None, thresholds_file="")
    run_config = resolve(_options(), launch, datastore="s3://bucket/root")
    assert (run_config.options.device, run_config.options.gpus_per_node) == ("cuda", 8)
    assert run_config.options.datastore == "s3://bucket/root"
    assert run_config.options.start_limit_s > 600  # machines and images have to come first


def test_thresholds_travel_with_a_run_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(FLOOR)
    launch = Launch.unpack(ask(_values(thresholds=str(file)), "batch", None).launch)
    file.unlink()
    run_config = resolve(_options(thresholds=str(file)), launch, datastore="s3://bucket/root")
    own = [row for row in checklist_launch.table_of(run_config.thresholds).rows if row.own]
    assert [(row.system, row.floor) for row in own] == [("here", 1_000_000)]
    with pytest.raises(UserError, match="This deployment was made with"):
        resolve(_options(thresholds="other.csv"), launch, datastore="s3://bucket/root")


def test_thresholds_too_large_to_travel_are_refused(tmp_path: Path) -> None:
    rows = [f"system-{os.urandom(20).hex()},gemm_fp32,1,{os.urandom(20).hex()}\n" for _ in range(200)]
    (tmp_path / "own.csv").write_text("system,op,floor,source\n" + "".join(rows))
    with pytest.raises(UserError, match="too large to travel"):
        ask(_values(thresholds=str(tmp_path / "own.csv")), "batch", None)


def test_a_deployment_can_not_change_its_gpus() -> None:
    launch = Launch(backend="kubernetes", gpus_per_node=8, thresholds=None, thresholds_file="")
    with pytest.raises(UserError, match="8 GPUs a node, not 4"):
        resolve(_options(gpus_per_node=4), launch, datastore="s3://bucket/root")
