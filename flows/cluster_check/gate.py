"""Gate of a training run: the newest checklist result of its cluster.

The newest finished ``verdict`` of ``ChecklistFlow`` on the same cluster
(``decorators/backends/cluster_name.py``) counts, regardless of who launched it. A failure less than a day old
stops the run, failed nodes are excluded, and the measured bandwidth is used for the estimate. Without a
checklist result the gate does nothing.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field

from checklist import result as results
from checklist.measurements import Collective
from checklist.outputs.taint import KEY, LABEL
from checklist.result import Result
from decorators._metaflow import Backend, print_line
from decorators.past_runs import NeverRunError, ended_tasks, read_for, runs_of
from estimator import hardware
from estimator.errors import UserError
from estimator.formatting import format_bytes, format_duration
from estimator.hardware.cluster import nodes as cluster_nodes
from estimator.plan import Plan
from estimator.throughput import MeasuredBandwidth

FLOW = "ChecklistFlow"
STEP = "verdict"
MAX_RUNS = 50  # number of newest runs of the flow to search
LIMIT_S = 20.0  # time limit of the search
DAY_S = 86_400.0
STOPS_S = DAY_S  # age up to which a failure stops runs; later the cluster may have been repaired
BANDWIDTH_S = 30 * DAY_S  # age up to which a measured bandwidth is used
IGNORE_VARIABLE = "METAFLOW_RUN_IGNORE_CHECKLIST"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The newest finished checklist of a cluster, which allows or stops a launch."""

    run: str
    """The checklist's run, such as ``ChecklistFlow/12``."""
    result: Result
    age_s: float
    """Seconds since it ended."""

    @property
    def ago(self) -> str:
        days = self.age_s / DAY_S
        age = format_duration(self.age_s) if days < 2 else f"{days:.0f} days"
        return f"{age} ago ({self.run})"

    def refusal(self, backend: Backend, *, resumes: bool = False) -> UserError | None:
        """Return the error that refuses a run on this cluster; None if the result is good or too old."""
        if self.result.verdict != "FAIL" or self.age_s >= STOPS_S:
            return None
        failed = [finding for finding in self.result.findings if finding.verdict == "FAIL"]
        bad_nodes = f" Bad nodes: {', '.join(self.result.bad_nodes)}." if self.result.bad_nodes else ""
        advice = [" ".join(finding.advice) for finding in failed[:1]]
        remote = "" if backend == "local" else f" --with {backend}"
        rerun = f"Then run the checklist again: finetune check{remote}"
        # resume takes no parameters, but Metaflow reads them from the environment
        override = f"{IGNORE_VARIABLE}=1 before the command" if resumes else "--ignore-checklist"
        return UserError(
            f"The checklist of this cluster failed {self.ago}: {self.result.headline}{bad_nodes}",
            "\n".join((*advice, rerun, f"To train anyway: {override}")),
        )

    def remarks(self) -> tuple[str, ...]:
        """Return warnings that do not stop the run."""
        if self.result.verdict == "FAIL":
            return (f"The checklist of this cluster failed {self.ago}: {self.result.headline}",)
        if self.result.verdict == "NO-VERDICT":
            return (f"The checklist of this cluster had no verdict {self.ago}: {self.result.headline}",)
        return ()

    def bandwidth(self) -> MeasuredBandwidth | None:
        """Return the bandwidth of NCCL collectives between machines; None if not measured or too old."""
        run = self.result.measurements
        largest = _largest_all_reduce(self.result)
        if run.local or run.backend != "nccl" or self.age_s >= BANDWIDTH_S or largest is None:
            return None
        count = len(run.nodes)
        inter = self.result.busbw_gbytes_per_s if count > 1 else None
        intra = largest.busbw_gbytes_per_s if count == 1 and largest.ranks > 1 else None
        if inter is None and intra is None:
            return None
        size = format_bytes(largest.bytes)
        scope = f"{count} nodes" if count > 1 else f"the {largest.ranks} GPUs of a node"
        return MeasuredBandwidth(
            inter_node_gbytes_per_s=inter,
            intra_node_gbytes_per_s=intra,
            source=f"{self.run}, all_reduce of {size} over {scope}",
            date=time.strftime("%Y-%m-%d", time.gmtime(self.result.finished_unix)),
        )

    def covers(self, plan: Plan) -> bool:
        """Whether the checklist measured the machines that a plan requests, as far as both are known."""
        names = {name for fact in self.result.measurements.facts for name in fact.gpu_names}
        gpus = {gpu.name for gpu in map(hardware.find_gpu_by_nvml_name, names) if gpu is not None}
        types = {fact.instance_type for fact in self.result.measurements.facts} - {None}
        instance_type = plan.request.instance_type
        return gpus == {plan.request.gpu_type} and (
            instance_type is None or not types or types == {instance_type}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeExclusion:
    """How the next run avoids failed nodes: node labels to require, and messages."""

    labels: tuple[tuple[str, str], ...] = ()
    """Labels that a node must have."""
    lines: tuple[str, ...] = ()


@dataclass(slots=True)
class _Search:
    """Result of the search thread."""

    results: list[Checked] = field(default_factory=list)
    problem: str | None = None


def check_newest(cluster: str, backend: Backend, *, ignored: bool, resumes: bool = False) -> Checked | None:
    """Return the newest checklist of a cluster, and print a line if it is not good; None if there is none.

    Raises UserError if it stops runs, unless ``ignored``.
    """
    checked, problem = newest(cluster)
    if problem is not None:
        print_line(problem)
    if checked is None:
        return None
    refusal = checked.refusal(backend, resumes=resumes)
    if refusal is not None and not ignored:
        raise refusal
    for line in checked.remarks():
        print_line(line)
    return checked


def newest(cluster: str, *, limit_s: float = LIMIT_S) -> tuple[Checked | None, str | None]:
    """Return (newest checklist of a cluster, message if the search failed).

    Searches ``MAX_RUNS`` runs of any user, through Metaflow's client, for at most ``limit_s`` seconds.
    """
    search = _Search()
    in_time = read_for(limit_s, lambda over: _search_runs(cluster, search, over))
    if search.results:
        return search.results[0], None
    if not in_time:
        return None, f"No checklist of this cluster was found within {limit_s:g} s."
    return None, search.problem


def _search_runs(cluster: str, search: _Search, stop: threading.Event) -> None:
    try:
        for task in ended_tasks(runs_of(FLOW, limit=MAX_RUNS), STEP, ("cluster", "result")):
            if stop.is_set():
                return
            if task["cluster"].data != cluster:
                continue
            run = f"{FLOW}/{task.pathspec.split('/')[1]}"
            try:
                result = results.from_json(json.dumps(task["result"].data))
            except UserError as error:
                search.problem = (
                    f"The newest checklist of this cluster ({run}) cannot be used: {error.problem}"
                )
                return
            age = max(0.0, time.time() - result.finished_unix)
            search.results.append(Checked(run=run, result=result, age_s=age))
            return
    except NeverRunError:  # no checklist has run yet
        return
    except Exception as error:  # noqa: BLE001 - whatever a metadata service or datastore may answer with
        search.problem = f"The checklists of this cluster cannot be read: {type(error).__name__}."


def exclude_nodes(checked: Checked, backend: Backend) -> NodeExclusion:
    """Return node labels or taints that keep the next run off failed nodes, at any age of the result."""
    bad_nodes = checked.result.bad_nodes
    if not bad_nodes or backend == "local":
        return NodeExclusion()
    failed = f"Nodes that failed the checklist: {', '.join(bad_nodes)}."
    if backend != "kubernetes":
        return NodeExclusion(lines=(f"{failed} {backend} cannot avoid them: terminate those machines.",))
    try:
        _, nodes = cluster_nodes.fetch()
    except UserError as error:
        return NodeExclusion(lines=(f"{failed} Their taints could not be read: {error.problem}",))
    failed_nodes = [node for node in nodes if node.name in bad_nodes]
    tainted = {node.name for node in failed_nodes if any(taint.startswith(KEY) for taint in node.taints)}
    fit = {node.name for node in nodes if node.labels.get(LABEL) == "true"}
    lines = []
    if tainted:
        lines.append(f"Excluded by their taint {KEY}: {', '.join(sorted(tainted))}.")
    untainted = {node.name for node in failed_nodes} - tainted
    labeled = untainted - fit if fit else set()
    if labeled:
        lines.append(f"Excluded by requiring the label {LABEL}=true: {', '.join(sorted(labeled))}.")
    lines += [
        f"Not excluded: {name}. To exclude it: kubectl taint nodes {name} {KEY}=true:NoSchedule"
        for name in sorted(untainted - labeled)
    ]
    return NodeExclusion(labels=((LABEL, "true"),) if labeled else (), lines=tuple(lines))


def explain_bandwidth(plan: Plan, bandwidth: MeasuredBandwidth) -> str | None:
    """Explain the plan's speed by the measured bandwidth; None if its links were not measured."""
    inter, intra = bandwidth.inter_node_gbytes_per_s, bandwidth.intra_node_gbytes_per_s
    if inter is not None and plan.layout.nodes > 1:
        return f"between nodes {inter:.4g} GB/s as measured ({bandwidth.source}, {bandwidth.date})"
    if intra is not None and plan.layout.processes_per_node > 1:
        return f"between a node's GPUs {intra:.4g} GB/s as measured ({bandwidth.source}, {bandwidth.date})"
    return None


def _largest_all_reduce(result: Result) -> Collective | None:
    """Return the all-reduce of the largest message, of which Result.busbw_gbytes_per_s is the bandwidth."""
    done = [
        item for item in result.measurements.collectives if item.op == "all_reduce" and item.error is None
    ]
    return max(done, key=lambda item: item.bytes, default=None)
