"""Steps of the checklist flow: one node's part of the run, past runs, verdict, report."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from checklist import measurements, past_runs
from checklist import result as results
from checklist.measurements import BROKEN_OFF, PHASES, Hang, Measurements, Phase
from checklist.outputs import publish
from checklist.outputs.publish import Outputs
from checklist.past_runs import History
from checklist.result import Result
from checklist.run import local
from checklist.run.rendezvous import of_node
from checklist.verdict import judge_with_options
from decorators._metaflow import FinetuneError, in_container, waits_for_other_nodes
from decorators.node_request import store_pod_failures
from decorators.past_runs import NeverRunError, ended_tasks, read_for, runs_of
from decorators.storage import datastore
from estimator.errors import UserError
from estimator.terminal import print
from flows.cluster_check import suspicions
from flows.cluster_check.launch import RunConfig, table_of
from flows.cluster_check.suspicions import Suspicion
from launchers.cluster.endpoint import NodeAddress
from launchers.cluster.processes import die_with_parent

MAX_RUNS = 30  # number of earlier runs to read; each carries forward open failures
HISTORY_S = 60.0  # time limit for reading them
FAILURES = ("FAIL", "NO-VERDICT")


def check_node(
    run_config: RunConfig, rendezvous: NodeAddress, work_dir: Path, key: str
) -> tuple[dict[str, Any] | None, str | None]:
    """Run the checks of one node. Returns (measurements of all nodes as plain values, problem).

    A failure of the node is returned, not raised, so that the verdict can use the measurements of the others.
    On node 0 the measurements so far are stored in the datastore under ``key``, in case its task does not
    end.
    """
    if not in_container():
        die_with_parent(os.getppid(), signal.SIGTERM)
    node_options = of_node(
        node=rendezvous.node,
        nodes=rendezvous.nodes,
        processes=run_config.options.gpus_per_node or 1,
        host=rendezvous.main_host,
        secret=rendezvous.secret,
        run=rendezvous.run,
        simulated=run_config.local,
    )
    try:
        uuids = run_config.shares[rendezvous.node]
        measured = local.run_node(
            run_config.options,
            replace(node_options, ports=rendezvous.ports),
            uuids,
            work_dir,
            lambda so_far: _store(key, so_far),
        )
        if rendezvous.node == 0:
            _store(key, measured)
    except UserError as error:
        print(f"node {rendezvous.node}: {error.problem}\n{error.advice}", flush=True)
        return None, error.problem
    except Exception as error:  # noqa: BLE001 - the others' measurements must still reach the verdict
        traceback.print_exc()
        return None, f"The checklist failed on node {rendezvous.node}: {type(error).__name__}."
    if rendezvous.node == 0:
        _fail_if_node_lost(measured)
    return measurements.to_dict(measured), None


def _fail_if_node_lost(measured: Measurements) -> None:
    """Fail this task if it would wait for a lost node; the verdict uses the stored measurements."""
    from metaflow import current

    lost_nodes = sorted({hang.node for hang in measured.hangs if hang.kind == "lost"})
    if lost_nodes and waits_for_other_nodes():
        nodes = " and ".join(f"node {node}" for node in lost_nodes)
        problem = f"Lost contact with {nodes}, so the step cannot succeed."
        store_pod_failures(current.run_id, [problem])
        raise FinetuneError(problem, "The verdict uses the measurements until then.")


def _store(key: str, measured: Measurements) -> None:
    """Store a copy in the datastore for the case that the step is lost; a failure is only printed."""
    try:
        datastore().put_bytes(key, measurements.to_json(measured).encode())
    except Exception as error:  # noqa: BLE001 - whatever a datastore may answer with
        print(f"Measurements so far could not be stored in the datastore: {type(error).__name__}: {error}")


def read_stored(key: str) -> Measurements | None:
    """Read the measurements that the nodes' tasks stored under that key; None if there are none."""
    try:
        return measurements.from_json(datastore().get_bytes(key).decode())
    except FileNotFoundError:
        return None


def merge(
    run_config: RunConfig,
    nodes: Iterable[tuple[int, dict[str, Any] | None, str | None]],
    *,
    lost: bool = False,
    stored: Measurements | None = None,
    endings: tuple[str, ...] = (),
) -> Measurements:
    """Merge the nodes' results (node, measurements, problem) to the measurements of the run; node 0's if
    present.

    ``lost``: the step failed as a whole. Then there may be only the ``stored`` measurements and ``endings``,
    one line per failed pod; and a lost node is not considered faulty, because its pod may have been
    preempted.
    """
    ordered = sorted(nodes, key=lambda item: item[0])
    problems = tuple(f"Node {node}: {problem}" for node, _, problem in ordered if problem)
    collected = next((measured for _, measured, _ in ordered if measured is not None), None)
    merged = stored if collected is None else measurements.record(Measurements, collected)
    if lost and not problems:
        problems = endings or ("A pod or container of the step did not finish.",)
    if merged is None:
        return _empty_measurements(run_config, problems)
    if lost and not run_config.local:
        merged = replace(merged, hangs=tuple(map(_reclassify_lost, merged.hangs)))
    if lost:
        merged = replace(merged, phases=tuple(_with_reason(phase, problems[0]) for phase in merged.phases))
    return replace(merged, notes=(*merged.notes, *problems))


def _with_reason(phase: Phase, reason: str) -> Phase:
    return replace(phase, reason=reason.rstrip(".")) if phase.reason == BROKEN_OFF else phase


def _reclassify_lost(hang: Hang) -> Hang:
    """Reclassify a lost node as taken by the cluster, such as by preemption."""
    return replace(hang, kind="taken") if hang.kind == "lost" else hang


def _empty_measurements(run_config: RunConfig, problems: tuple[str, ...]) -> Measurements:
    """Return the measurements of a run without results; every phase has the reason."""
    options = run_config.options
    reason = problems[0] if problems else "no node responded"
    return Measurements(
        started_unix=time.time(),
        seconds=0.0,
        profile=options.profile,
        device="cuda" if options.device == "cuda" else "cpu",
        backend="nccl" if options.device == "cuda" else "gloo",
        nodes_asked=options.nodes,
        gpus_per_node_asked=options.gpus_per_node or 1,
        local=run_config.local,
        phases=tuple(Phase(name=name, status="failed", reason=reason.rstrip(".")) for name in PHASES),
        notes=problems,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PastRuns:
    """Earlier runs of the same cluster."""

    runs: tuple[past_runs.PastRun, ...] = ()
    history: History = field(default_factory=History)
    notes: tuple[str, ...] = ()


def read_past_runs(flow: str, cluster: str, run_id: str) -> PastRuns:
    """Read the results of the newest earlier runs of this flow on this cluster, through Metaflow's client.

    Never raises and returns within ``HISTORY_S``: unreadable runs are skipped with a note.
    """
    runs: list[past_runs.PastRun] = []
    problems: list[str] = []
    in_time = read_for(HISTORY_S, lambda over: _read_past(flow, cluster, run_id, runs, problems, over))
    notes = [] if in_time else [f"Reading earlier runs stopped after {HISTORY_S:g} s."]
    finished, unread = tuple(runs), tuple(problems)  # the thread may still append to its lists
    history = past_runs.fold(finished, unread)
    count = "1 earlier run" if len(finished) == 1 else f"{len(finished)} earlier runs"
    notes.append(
        f"History: {count} of {cluster}, {len(history.records)} figures, "
        f"{len(history.open_failures)} failures still open."
    )
    return PastRuns(runs=finished, history=history, notes=(*notes, *unread))


def _read_past(
    flow: str,
    cluster: str,
    run_id: str,
    runs: list[past_runs.PastRun],
    problems: list[str],
    stop: threading.Event,
) -> None:
    try:
        other_runs = (run for run in runs_of(flow) if run.id != run_id)
        for task in ended_tasks(other_runs, "verdict", ("cluster", "kept")):
            if stop.is_set():
                return
            if task["cluster"].data != cluster:
                continue
            try:
                runs.append(past_runs.from_json(json.dumps(task["kept"].data)))
            except UserError as error:
                problems.append(f"Run {task.pathspec.split('/')[1]} cannot be used: {error.problem}")
            if len(runs) >= MAX_RUNS:
                return
    except NeverRunError:  # this is the first run, which is not recorded yet
        return
    except Exception as error:  # noqa: BLE001 - an unreadable history must not lose the result
        problems.append(f"The history could not be read completely: {type(error).__name__}: {error}")


def with_suspects(run_config: RunConfig, suspicions: Iterable[Suspicion]) -> RunConfig:
    """Return the configuration in which nodes that training runs reported as slow are measured first."""
    options = run_config.options
    names = tuple(dict.fromkeys((*options.suspects, *(suspicion.node for suspicion in suspicions))))
    return replace(run_config, options=options.model_copy(update={"suspects": names}))


def judge_run(
    run_config: RunConfig, measured: Measurements, past: PastRuns, open_suspicions: Iterable[Suspicion] = ()
) -> Result:
    """Return the run's result, compared with its history."""
    result = judge_with_options(
        measured,
        run_config.options,
        past.history,
        thresholds=table_of(run_config.thresholds),
        reference=run_config.reference,
    )
    return replace(result, notes=(*result.notes, *suspicions.notes(open_suspicions), *past.notes))


def to_plain(result: Result) -> dict[str, Any]:
    """Return the content of result.json."""
    values: dict[str, Any] = json.loads(results.to_json(result))
    return values


def from_plain(values: Mapping[str, Any]) -> Result:
    """Undo :func:`to_plain`."""
    return measurements.record(Result, dict(values))


def summarize(result: Result) -> dict[str, Any]:
    """Return the part of a result that later runs read."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(past_runs.run_of(result))))
    return values


def publish_result(result: Result, outputs: Outputs, file: Path | None) -> None:
    """Write the copy and call every output. Failures are printed: the datastore has the result already."""
    if file is not None:
        try:
            results.write(result, file)
            print(f"result: {file.absolute()}")
        except UserError as error:
            print(f"{error.problem} {error.advice}", file=sys.stderr)
    for report in publish.publish(result, outputs):
        for line in report.lines:
            print(line, file=sys.stderr if report.failed else sys.stdout)
    sys.stdout.flush()


def explain_refusal(result: Result) -> UserError | None:
    """Return the error of the flow's last step; None if the cluster is healthy, as far as is known."""
    if result.verdict not in FAILURES:
        return None
    advice = next((" ".join(finding.advice) for finding in result.findings if finding.advice), "")
    if not result.findings and result.standing:
        open_checks = ",".join(dict.fromkeys(item.check for item in result.standing))
        advice = (
            "It clears when the same check with the same effort measures it again without findings: "
            f"--only {open_checks}"
        )
    return UserError(f"{result.verdict}: {result.headline}", advice)
