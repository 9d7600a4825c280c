"""Steps of the checklist flow with partial or missing measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checklist import measurements
from checklist.measurements import Hang, Phase
from checklist.verdict import judge
from decorators.past_runs import NeverRunError
from estimator.errors import UserError
from flows.cluster_check import steps
from flows.cluster_check.launch import Launch, resolve
from launchers.cluster.endpoint import NodeAddress, Secret
from tests.checklist.runs import gpu_run
from tests.flows.checklist_options import options_with, run_config_with


def test_a_run_without_results_has_no_verdict_and_states_the_reason() -> None:
    run_config = run_config_with()
    measured = steps.merge(run_config, [(1, None, "it was killed"), (0, None, "no port is free")])
    result = steps.judge_run(run_config, measured, steps.PastRuns())
    assert result.verdict == "NO-VERDICT"
    assert "Node 0: no port is free" in result.headline
    assert steps.from_plain(steps.to_plain(result)) == result
    refusal = steps.explain_refusal(result)
    assert refusal.problem.startswith("NO-VERDICT: ")


def test_a_lost_step_is_judged_by_stored_measurements_and_its_lost_node_is_not_blamed() -> None:
    launch = Launch(backend="kubernetes", gpus_per_node=8, thresholds=None, thresholds_file="")
    run_config = resolve(options_with(), launch, datastore="s3://bucket/root")
    lost = Hang(
        rank=8, node=1, phase="world", op="all_reduce", sequence=3, waited_s=1, kind="lost", detail="gone"
    )
    run = gpu_run(2)
    ended = Phase(name="world", status="failed", reason="node 1 was lost")
    phases = tuple(ended if phase.name == "world" else phase for phase in run.phases)
    partial_run = replace(run, hangs=(lost,), phases=phases, collectives=(), transport=None)

    reported = steps.judge_run(run_config, steps.merge(run_config, [], stored=partial_run), steps.PastRuns())
    assert (reported.verdict, reported.bad_nodes) == ("FAIL", ("host-1",)), (
        "a step that ended well: it is the node"
    )

    result = steps.judge_run(
        run_config, steps.merge(run_config, [], lost=True, stored=partial_run), steps.PastRuns()
    )
    assert (result.verdict, result.bad_nodes, result.healthy_nodes) == ("NO-VERDICT", (), ())
    assert "host-1 was lost in all_reduce of phase world" in result.check("hangs").reason  # type: ignore[union-attr]
    assert any("did not finish" in note for note in result.notes)
    assert steps.from_plain(steps.to_plain(result)) == result

    pod = "pod t-1 on node-b has failed: Evicted: low on memory"
    measured = steps.merge(run_config, [], lost=True, endings=(pod,))
    nothing = steps.judge_run(run_config, measured, steps.PastRuns())
    assert nothing.verdict == "NO-VERDICT"
    assert pod in nothing.headline


def test_a_busy_gpu_is_not_put_under_load_and_does_not_pass() -> None:
    run = gpu_run(2)
    why = "the GPU of rank 0 on host-0 is used by 3 other processes"
    phases = tuple(
        replace(phase, status="skipped", reason=why) if phase.name in ("node", "world", "pairs") else phase
        for phase in run.phases
    )
    busy = replace(run, phases=phases, locals=(), collectives=(), pairs=(), health=(), transport=None)
    result = steps.judge_run(run_config_with(), busy, steps.PastRuns())
    assert result.verdict == "NO-VERDICT"
    assert why in result.headline
    assert why in steps.explain_refusal(result).problem  # type: ignore[union-attr]


@pytest.mark.parametrize("node", [0, 1])
def test_node_0_stores_the_measurements_and_every_node_returns_them(
    node: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured, stored = gpu_run(2), list[Any]()
    monkeypatch.setattr(steps, "_store", lambda key, value: stored.append((key, value)))
    monkeypatch.setattr(steps, "die_with_parent", lambda *_: None)
    monkeypatch.setattr(steps.local, "run_node", lambda *_: measured)
    config = run_config_with(nodes=2, gpus_per_node=1)
    address = NodeAddress(
        node=node, nodes=2, main_host="127.0.0.1", ports=(1,), secret=Secret.make(), run="7/check/0"
    )
    part, problem = steps.check_node(config, address, tmp_path, "key")
    assert (part, problem) == (measurements.to_dict(measured), None)
    assert stored == ([("key", measured)] if node == 0 else [])

    def fail(*_: Any) -> Any:
        raise UserError("No port is free.", "Free one.")

    monkeypatch.setattr(steps.local, "run_node", fail)
    assert steps.check_node(config, address, tmp_path, "key") == (None, "No port is free.")


class EndedTask(dict[str, Any]):
    """The task "verdict" of an earlier run with its artifacts."""

    finished = True

    def __init__(self, run: int, **artifacts: Any) -> None:
        super().__init__({name: SimpleNamespace(id=name, data=data) for name, data in artifacts.items()})
        self.pathspec = f"ChecklistFlow/{run}/verdict/1"

    def __iter__(self) -> Any:
        return iter(self.values())


def test_only_earlier_runs_of_this_cluster_and_schema_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USERNAME", "tester")
    good = steps.summarize(judge(gpu_run(2)))
    failed = {**steps.summarize(judge(gpu_run(2, started_unix=2_000.0, probes=()))), "verdict": "FAIL"}

    class Run(dict[str, Any]):
        id = "1"

    stored = [
        (9, "here", failed),
        (8, "there", good),
        (7, "here", {**good, "version": 99}),
        (6, "here", good),
    ]
    runs = [
        Run(verdict=SimpleNamespace(task=EndedTask(number, cluster=cluster, kept=partial_run)))
        for number, cluster, partial_run in stored
    ]
    monkeypatch.setattr(steps, "runs_of", lambda _: runs)
    past = steps.read_past_runs("ChecklistFlow", "here", "10")
    assert [run.verdict for run in past.runs] == ["FAIL", good["verdict"]]
    assert any("2 earlier runs of here" in note for note in past.notes)
    assert any("Run 7 cannot be used" in note and "schema version 99" in note for note in past.notes)
    monkeypatch.setattr(steps, "MAX_RUNS", 1)
    assert len(steps.read_past_runs("ChecklistFlow", "here", "10").runs) == 1
    assert steps.read_past_runs("ChecklistFlow", "here", "1").runs == (), "the run itself is no earlier one"

    def never(_: str) -> Any:
        raise NeverRunError

    monkeypatch.setattr(steps, "runs_of", never)
    past = steps.read_past_runs("ChecklistFlow", "here", "10")
    assert past.notes == ("History: 0 earlier runs of here, 0 figures, 0 failures still open.",)
