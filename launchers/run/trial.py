"""Trials: a few steps with each of the best plans on the run's machines, to choose the fastest plan.

A predicted speed is accurate to about 20 %, so another of the best plans may be faster. All nodes run the
same trials in the same order; the first node stores its decision in the run's store, where the other nodes
and later attempts read it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from estimator.errors import UserError
from estimator.formatting import format_bytes
from estimator.plan import Counted, Plan
from estimator.terminal import print
from launchers.cluster.endpoint import NodeAddress
from launchers.dataset.prepared import Prepared
from launchers.gang.failures import Failure, GangFailed
from launchers.gang.job import TrainJob
from launchers.gang.node import run_node
from launchers.report.metrics import median, tokens_of_steps
from launchers.report.peak import MemoryPeak, largest_process
from launchers.report.state import RankMeasured, RunState
from launchers.run.job import build_job, predict_for_data
from launchers.settings.sections import ProfileWindow
from launchers.store.bundles import Storage

# Unmeasured steps at the beginning: the first creates the optimizer's states and loads kernels, the second
# is the first that reaches the memory peak.
WARM_UP = 2
DECISION_S = 600.0  # time limit for the first node's decision after the trials


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Result of one plan's trial."""

    plan: Plan
    steps: int  # number of measured steps; 0: the trial failed
    tokens_per_second: float | None  # median of the measured steps, over all processes
    ranks: tuple[RankMeasured, ...]  # ranks of the first node
    failure: str | None = None  # first line of the error
    out_of_memory: bool = False

    @property
    def memory_peak(self) -> MemoryPeak | None:
        """Peak of the largest process: torch's reserved memory on GPUs, resident memory on CPUs."""
        return largest_process(
            (rank.reserved_peak_bytes for rank in self.ranks), (rank.rss_peak_bytes for rank in self.ranks)
        )

    @property
    def predicted_memory(self) -> Counted | None:
        """Predicted value of :attr:`memory_peak`; known even if the trial failed before the measurement."""
        on_gpu = self.plan.layout.device == "cuda"
        return self.plan.prediction.memory.counted("reserved" if on_gpu else "resident")

    def to_dict(self) -> dict[str, object]:
        """Convert to JSON-compatible values."""
        return {**dataclasses.asdict(self), "plan": self.plan.to_json()}

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> TrialResult:
        """Restore a result from :meth:`to_dict`."""
        ranks = tuple(RankMeasured(**rank) for rank in values["ranks"])  # type: ignore[attr-defined]
        plan = Plan.from_json(str(values["plan"]))
        return cls(**{**values, "plan": plan, "ranks": ranks})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Chosen plan and results of a run's trials."""

    plan: Plan
    results: tuple[TrialResult, ...]  # in trial order, the launched plan first


def find_decision(store: Storage, prefix: str) -> Decision | None:
    """Return the stored decision of this or an earlier attempt; None if there is none yet."""
    try:
        values = json.loads(store.get_bytes(f"{prefix}/trial.json"))
    except FileNotFoundError:
        return None
    results = tuple(TrialResult.from_dict(result) for result in values["results"])
    return Decision(plan=Plan.from_json(values["plan"]), results=results)


def run_trials(
    job: TrainJob,
    address: NodeAddress,
    store: Storage,
    prefix: str,
    *,
    on_result: Callable[[TrialResult], None] = lambda _: None,
) -> Decision:
    """Try the best plans on this run's machines and choose one; called on every node.

    Parameters
    ----------
    job:
        The job as launched, from its first step; ``job.settings.trial`` is the number of measured steps.
    prefix:
        Key prefix of the decision in the store.
    on_result:
        Called with each trial's result on the first node.

    Raises
    ------
    UserError, SystemExit
        As :func:`launchers.gang.node.run_node` does; UserError also if every plan failed for a reason other
        than memory.
    GangFailed
        Every plan ran out of memory; a retry then uses a plan that needs less.
    """
    from estimator.planning.trials import trial_plans  # slow to import, and most runs have no trial

    planned = build_job(job.settings, job.model.spec, steps=None)
    data = Prepared(job.data_dir)
    plans = [
        predict_for_data(plan, job.settings, job.model.spec, data.info)
        for plan in trial_plans(job.plan, planned)
    ]
    tokens, results, error = tokens_of_steps(data), list[TrialResult](), None
    steps = min(WARM_UP + job.settings.trial, job.total_steps)
    for number, plan in enumerate(plans, 1):
        trial = replace(
            job,
            plan=plan,
            settings=job.settings.model_copy(update={"checkpoint_every": 0, "profile": ProfileWindow()}),
            work_dir=job.work_dir.with_name(f"trial-{number}"),
            total_steps=steps,
            keeps_result=False,
        )
        _print_on_first_node(
            address, f"trial {number} of {len(plans)}: {describe_layout(plan)}, {steps} steps"
        )
        state = RunState(plan, tokens_of_steps=tokens)
        # A separate run name, so that a node that starts early cannot join the gang that is just ending
        trial_address = replace(address, run=f"{address.run}/trial-{number}")
        try:
            run_node(trial, trial_address, on_event=state.add)
        except GangFailed as failed:
            error = failed
            results.append(_result(state, plan, failed.failure))
        else:
            results.append(_result(state, plan))
        finally:
            shutil.rmtree(trial.work_dir, ignore_errors=True)
        _print_on_first_node(address, f"  {describe_result(results[-1])}")
        if address.node == 0:
            on_result(results[-1])
    if address.node != 0:
        return _await_decision(store, prefix)
    succeeded = [result for result in results if result.failure is None]
    if not succeeded and error is not None:
        raise error
    fastest = max(succeeded, key=lambda result: result.tokens_per_second or 0.0)
    decision = Decision(plan=fastest.plan, results=tuple(results))
    _store_decision(store, prefix, decision)
    _print_on_first_node(address, f"fastest: {describe_layout(decision.plan)}")
    return decision


def _store_decision(store: Storage, prefix: str, decision: Decision) -> None:
    results = [result.to_dict() for result in decision.results]
    values = {"plan": decision.plan.to_json(), "results": results}
    store.put_bytes(f"{prefix}/trial.json", json.dumps(values).encode())


def _await_decision(store: Storage, prefix: str) -> Decision:
    """Wait for the decision of the first node; raises UserError after :data:`DECISION_S`."""
    deadline = time.monotonic() + DECISION_S
    while time.monotonic() < deadline:
        decision = find_decision(store, prefix)
        if decision is not None:
            return decision
        time.sleep(1)
    raise UserError(
        f"The first node has not chosen one of the tried plans within {DECISION_S:.0f} s.",
        "See its log, or run without --trial.",
    )


def describe_layout(plan: Plan) -> str:
    """Format the layout settings in which the plans of trials differ."""
    layout = plan.layout
    checkpointing = "checkpointing" if layout.activation_checkpointing else "no checkpointing"
    sharding = "" if layout.sharding == "none" else f"{layout.sharding}, "
    return f"{sharding}micro batch {layout.micro_batch_size} x {layout.accumulation}, {checkpointing}"


def describe_result(result: TrialResult) -> str:
    """Format a trial's measurements and predictions in one line."""
    memory, peak = result.predicted_memory, result.memory_peak
    source = " reserved by torch" if result.plan.layout.device == "cuda" else ""
    predicted = (
        f"predicted {describe_rate(result.plan.prediction.tokens_per_second)}, "
        f"memory {format_bytes(memory.likely_bytes if memory else None)}{source}"
    )
    if result.out_of_memory:
        return f"{predicted}; ran out of memory"
    if result.failure is not None:
        return f"{predicted}; failed: {result.failure}"
    measured = format_bytes(peak.size_bytes if peak else None)
    return f"{predicted}; measured {describe_rate(result.tokens_per_second)}, memory {measured}"


def describe_rate(tokens_per_second: float | None) -> str:
    """Format a speed."""
    return "unknown speed" if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s"


def _print_on_first_node(address: NodeAddress, line: str) -> None:
    if address.node == 0:
        print(line, flush=True)


def _result(state: RunState, plan: Plan, failure: Failure | None = None) -> TrialResult:
    """Build the result of one plan's trial from the telemetry of its steps."""
    rates = [step.tokens_per_second for step in state.metrics if step.step > WARM_UP]
    return TrialResult(
        plan=plan,
        steps=0 if failure else len(rates),
        tokens_per_second=None if failure else median(rates),
        ranks=state.ranks,
        failure=failure.message.splitlines()[0] if failure else None,
        out_of_memory=failure is not None and failure.out_of_memory,
    )
