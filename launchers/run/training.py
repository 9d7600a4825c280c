"""Training on one node: resume from the newest checkpoint, run this node's part of the gang, store logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.masking import mask_file
from estimator.plan import Plan
from estimator.terminal import print
from estimator.vocabulary import TASKS
from launchers.cluster.endpoint import NodeAddress
from launchers.dataset.measured import MAX_ROWS
from launchers.dataset.prepared import Prepared
from launchers.evaluation import reference
from launchers.gang.departure import NO_GRACE, Grace
from launchers.gang.failures import GangFailed
from launchers.gang.job import TrainJob
from launchers.gang.node import run_node
from launchers.report.evaluations import (
    HeldOutLoss,
    describe_export,
    describe_stop,
    evaluation_line,
    stops_early,
)
from launchers.report.metrics import Metrics, dist_lines, tokens_of_steps
from launchers.report.peak import MemoryPeak
from launchers.report.progress import Progress
from launchers.report.state import RunState
from launchers.report.stragglers import Stragglers, describe
from launchers.report.telemetry import DistInfo, Evaluated, Event, Phase, Profiled, Step, StepTiming, Warned
from launchers.report.trackers import Trackers
from launchers.report.window import Window, summary_lines
from launchers.run.export_best import export_best, has_no_steps_left, last_step
from launchers.run.job import predict_for_data
from launchers.run.replanning import Replanning, choose_plan, plan_after_kill, plan_after_out_of_memory
from launchers.run.trial import TrialResult, find_decision, run_trials
from launchers.store.bundles import Storage, put_bundle
from launchers.store.checkpoints import CheckpointStore, restore_newest

_EVALUATION_INTERVAL_S = 10.0  # minimum time between two progress lines of an evaluation


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a run: its keys in the store, and the runs that it may resume from."""

    run: str  # name of the run in logs and trackers
    number: int
    checkpoints: str  # key prefix of this run's checkpoints
    origins: tuple[str, ...] = ()  # key prefixes of runs to resume from, nearest first
    logs: str  # key of the bundle of this node's logs
    profile: str  # key prefix of the traces of this node's ranks
    plans: str | None = None  # key prefix of plans for later attempts; None: all attempts use the same plan
    requested_plan: Plan | None = None  # plan whose machines were requested for this attempt; None: the job's
    other_machines: bool = False  # whether a later attempt can get another GPU
    killed: str | None = None  # container of the previous attempt that was killed for its memory, if known


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """Result of one node's training for the following steps."""

    job: TrainJob  # its plan is the one this attempt used
    metrics: tuple[Metrics, ...]  # node 0: all steps, including those before resumed_from; other nodes: empty
    memory_peak: MemoryPeak | None  # largest process of this node since its start; None: not reported
    windows: tuple[Window, ...] = ()  # profiled by this node's ranks
    evaluations: tuple[HeldOutLoss, ...] = ()  # during training, including those before resumed_from
    exported_step: int  # step that was exported

    @property
    def resumed_from(self) -> int:
        """Step the attempt resumed from; 0: from the start."""
        return self.job.start_step

    @property
    def exported(self) -> list[tuple[str, str]]:
        """Rows of (label, text) that describe the exported step; empty for a run without evaluations."""
        last, settings = last_step(self.job, self.evaluations), self.job.settings.evaluation
        return describe_export(self.evaluations, settings, exported=self.exported_step, last_step=last)


def train(
    job: TrainJob,
    attempt: Attempt,
    address: NodeAddress,
    store: Storage,
    work: Path,
    *,
    state: RunState | None = None,
    on_event: Callable[[Event], None] = lambda _: None,
    on_trial: Callable[[TrialResult], None] = lambda _: None,
    grace: Grace = NO_GRACE,
) -> TrainingResult:
    """Train as one node of the gang; return when all nodes are done, raise when any node has failed.

    If the attempt runs out of memory, a plan that needs less is stored for the next attempt.

    Parameters
    ----------
    job:
        The job as launched; this attempt's plan and the checkpoint to resume from are chosen here.
    store:
        Storage of checkpoints and logs.
    work:
        Folder of this node.
    state:
        Updated with this attempt's plan and every telemetry event of the node's ranks; None: a new state.
    on_event:
        Called with every telemetry event after ``state`` is updated.
    on_trial:
        Called on the first node with each trial's result (``job.settings.trial``).
    grace:
        Signals that end this node after a checkpoint was stored.

    Raises
    ------
    UserError, GangFailed, SystemExit
        As :func:`launchers.gang.node.run_node` does.
    """
    launched = job.plan
    job = with_reference(job, address, store, work)
    plans = Replanning(storage=store, prefix=attempt.plans) if attempt.plans is not None else None
    if job.settings.trial:
        job = replace(job, plan=_plan_from_trials(job, attempt, address, store, plans, on_trial))
    if plans is not None:
        report = print if address.node == 0 else lambda _: None  # only node 0 logs what all nodes do
        job = replace(job, plan=_choose_plan(plans, job, attempt, report))
    data = Prepared(job.data_dir)
    job = replace(job, plan=predict_for_data(job.plan, job.settings, job.model.spec, data.info))
    state = state if state is not None else RunState()
    state.plan, state.total_steps = job.plan, job.total_steps
    # Rank 0 counts the tokens of sampled answers, which the prepared prompts do not contain
    state.tokens_of_steps = None if TASKS[job.settings.task].draws_answers else tokens_of_steps(data)
    reporter = _Reporter(job, attempt.run, state, _Traces(store, attempt.profile), on_event, address.node)
    fingerprint = _checkpoint_fingerprint(data, job.plan, launched)
    checkpoints = CheckpointStore(
        store,
        f"{attempt.checkpoints}/{fingerprint}",
        attempt=attempt.number,
        origins=[f"{origin}/{fingerprint}" for origin in attempt.origins],
        keep=job.settings.keep_checkpoints,
        notes=reporter.notes,
    )
    checkpoint, skipped = restore_newest(checkpoints, work / "resume")
    for line in skipped:
        print(f"unusable checkpoint: {line}")
    if checkpoint and address.node == 0:
        print(f"resuming from the checkpoint of step {checkpoint.step} of {job.total_steps}", flush=True)
    if checkpoint:
        state.restore(checkpoint.extra, with_metrics=address.node == 0)
        job = replace(
            job, start_step=checkpoint.step, resume_dir=work / "resume", evaluations=state.evaluations
        )
        if address.node == 0:
            _warn_missed_window(job)
    try:
        if not has_no_steps_left(job):
            run_node(job, address, on_event=reporter, checkpoints=checkpoints, grace=grace)
        exported = export_best(job, state.evaluations, address, checkpoints, work / "best", reporter)
    except GangFailed as error:
        if plans is not None and error.failure.out_of_memory:
            _plan_next_attempt(plans, attempt, job, address)
        raise
    finally:
        reporter.close()
        _store_logs(store, attempt.logs, job.logs_dir)
        reporter.traces.store(job.profile_dir)
    return TrainingResult(
        job=job,
        metrics=state.metrics,
        memory_peak=state.memory_peak,
        windows=state.windows,
        evaluations=state.evaluations,
        exported_step=exported,
    )


def _checkpoint_fingerprint(data: Prepared, plan: Plan, launched: Plan) -> str:
    """Return the part of a checkpoint's key that prevents use with other data, settings or ZeRO stages.

    ``launched``: plan that the run was launched with.
    """
    fingerprint = data.info.fingerprint
    if plan.engine == "deepspeed" and plan.layout.sharding != launched.layout.sharding:
        fingerprint += f"-{plan.layout.sharding}"  # DeepSpeed cannot resume from another ZeRO stage
    return fingerprint


def with_reference(job: TrainJob, address: NodeAddress, store: Storage, work: Path) -> TrainJob:
    """Add precomputed latents or reference log-probabilities to the job, if its task needs them.

    All nodes compute them together, or reuse what is in ``store``. Raises UserError and RankFailed as
    :func:`launchers.precompute.parts.compute_all` does.
    """
    images = TASKS[job.settings.task].images
    if not images and not reference.is_needed(job):
        return job
    from launchers.precompute import latents  # slow to import, and for images only

    precompute = latents.precompute if images else reference.precompute
    job = replace(job, reference=precompute(job, address, store, work / "reference"))
    if not job.evaluates:
        return job
    held_out = replace(job, data_dir=job.held_out_dir)
    held_out_reference = precompute(held_out, address, store, work / "held-out", max_rows=MAX_ROWS)
    return replace(job, held_out_reference=held_out_reference)


def _plan_next_attempt(plans: Replanning, attempt: Attempt, job: TrainJob, address: NodeAddress) -> None:
    """Store and log a plan that needs less memory, for the next attempt."""
    spec, other_machines = job.model.spec, attempt.other_machines
    line = plan_after_out_of_memory(
        plans, attempt.number, job.plan, job.settings, spec, other_machines=other_machines
    )
    if address.node == 0:
        print(line, flush=True)


def _plan_from_trials(
    job: TrainJob,
    attempt: Attempt,
    address: NodeAddress,
    store: Storage,
    plans: Replanning | None,
    on_trial: Callable[[TrialResult], None],
) -> Plan:
    """Return the plan chosen by the run's trials; the trials run only in its first attempt."""
    prefix = f"trials/{attempt.run}"
    decision = find_decision(store, prefix)
    if decision is None and attempt.number == 0:
        try:
            decision = run_trials(job, address, store, prefix, on_result=on_trial)
        except GangFailed as error:
            if plans is not None and error.failure.out_of_memory:
                _plan_next_attempt(plans, attempt, job, address)
            raise
    return job.plan if decision is None else decision.plan


def _choose_plan(plans: Replanning, job: TrainJob, attempt: Attempt, report: Callable[[str], None]) -> Plan:
    """Return this attempt's plan: the job's, or one that needs less after an attempt out of memory."""
    if attempt.killed is not None:
        report(
            plan_after_kill(
                plans,
                attempt.number,
                job.plan,
                job.settings,
                job.model.spec,
                killed=attempt.killed,
                requested_plan=attempt.requested_plan,
            )
        )
    return choose_plan(plans, attempt.number, job.plan, requested_plan=attempt.requested_plan, report=report)


def _warn_missed_window(job: TrainJob) -> None:
    """Print a warning if the profiled window starts before the step that the run resumes from."""
    first, last = job.settings.profile.window or (job.total_steps, job.total_steps)
    if job.start_step >= last:
        print(f"profile.steps {first}:{last} ends before the resumed step {job.start_step}: no profile")
    elif job.start_step >= first:
        print(f"profile.steps {first}:{last}: only steps {job.start_step + 1}:{last} are left to profile")


class _Traces:
    """Trace files of a node's profiled windows, and their location in the store."""

    def __init__(self, store: Storage, key: str) -> None:
        self._store, self._key = store, key

    def with_location(self, event: Profiled) -> Profiled:
        """Return the event with the location at which :meth:`store` will put the window's files."""
        if event.window is None:
            return event
        window = Window.from_dict(event.window)
        window = replace(
            window,
            trace=self._store.describe(f"{self._key}/{window.trace}"),
            snapshot=self._store.describe(f"{self._key}/{window.snapshot}") if window.snapshot else None,
        )
        return replace(event, window=window.to_dict())

    def store(self, folder: Path) -> None:
        """Store the files; a failure is only printed, so that it does not hide the run's error."""
        try:
            for path in sorted(folder.glob("rank-*")):
                self._store.put_file(f"{self._key}/{path.name}", path)
        except (UserError, OSError) as error:
            print(f"the traces of the profiled window could not be stored: {error}")


def _store_logs(store: Storage, key: str, folder: Path) -> None:
    """Store every rank's logs, with secrets masked.

    A failure is only printed, so that it does not hide the run's error.
    """
    if not folder.is_dir():
        return
    try:
        for path in folder.rglob("*.log"):
            mask_file(path)
        put_bundle(store, key, folder)
    except (UserError, OSError) as error:
        print(f"the ranks' logs could not be stored: {error}")


class _Reporter:
    """Adds this node's telemetry to the run's state, prints it, and sends metrics to the trackers."""

    def __init__(
        self,
        job: TrainJob,
        run: str,
        state: RunState,
        traces: _Traces,
        on_event: Callable[[Event], None],
        node: int,
    ) -> None:
        self.traces = traces
        self._job, self._run, self._state, self._node = job, run, state, node
        self._progress_at = 0.0  # time of the last progress line of an evaluation
        self._on_event = on_event
        self._trackers: Trackers | None = None
        layout = job.plan.layout
        self._stragglers = Stragglers(layout.world_size, layout.processes_per_node)
        self._progress = Progress(total_steps=job.total_steps, interval=job.settings.log_every)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepTiming):
            for straggling in self._stragglers.add(event):
                on_gpus = self._job.plan.layout.device == "cuda"
                print(
                    f"{'' if straggling.over else 'WARNING: '}{describe(straggling, on_gpus=on_gpus)}",
                    flush=True,
                )
                self._add(straggling)
            return
        if isinstance(event, Profiled):
            event = self.traces.with_location(event)
        ranks, evaluations = len(self._state.infos), len(self._state.evaluations)
        known_warnings = self._state.warnings
        self._add(event)
        if isinstance(event, DistInfo):
            if ranks < len(self._state.infos) == self._job.plan.layout.processes_per_node:
                # In one write, because nodes on one machine share standard output
                print("\n".join([*dist_lines(self._state.infos), ""]), end="", flush=True)
        elif isinstance(event, Warned):
            if event.text not in known_warnings:
                print(f"WARNING: {event.text}", flush=True)
        elif isinstance(event, Profiled):
            self._print_window(event)
        elif isinstance(event, Evaluated):
            if event.loss is None:
                self._print_evaluation_progress(event)
            elif self._node == 0 and evaluations < len(self._state.evaluations):
                self._print_evaluation()
        elif isinstance(event, Phase) and event.rank == 0:
            if event.name == "save":
                print(f"saving the model after step {event.step}", flush=True)
            elif event.name == "checkpoint" and self._progress.prints_checkpoint():
                print(f"checkpoint after step {event.step}", flush=True)
        elif isinstance(event, Step) and event.loss is not None:
            metrics, peak = self._state.step(event.step), self._state.memory_peak
            self._progress.step(metrics, None if peak is None else peak.size_bytes)
            self._track(metrics.step, metrics.figures())

    def _add(self, event: Event) -> None:
        self._state.add(event)
        self._on_event(event)

    def _print_window(self, event: Profiled) -> None:
        if event.window is None:
            print(f"WARNING: rank {event.rank} could not be profiled: {event.problem}", flush=True)
            return
        window = Window.from_dict(event.window)
        text = [
            *summary_lines(window, self._job.plan.prediction),
            f"  trace (after the run): {window.trace}",
            "",
        ]
        print("\n".join(text), end="", flush=True)  # in one write: nodes may share standard output

    def _print_evaluation_progress(self, event: Evaluated) -> None:
        if event.rank == 0 and event.at - self._progress_at >= _EVALUATION_INTERVAL_S:
            self._progress_at = event.at
            print(f"evaluating after step {event.step}: {event.done} of {event.rows} rows", flush=True)

    def _print_evaluation(self) -> None:
        losses, settings = self._state.evaluations, self._job.settings
        print(evaluation_line(losses), flush=True)
        if stops_early(losses, settings.evaluation):
            print(describe_stop(losses, settings.evaluation), flush=True)
        self._track(losses[-1].step, losses[-1].figures(settings.task))

    def _track(self, step: int, figures: dict[str, float]) -> None:
        if self._trackers is None:
            settings = self._job.settings
            folder = Path(settings.output_dir).expanduser() / "trackers"
            self._trackers = Trackers(settings, run_name=self._run, folder=folder)
        self._trackers.log(step, figures)

    def notes(self, step: int) -> dict[str, Any]:
        """Return the part of the run's state to store in a checkpoint of this step."""
        return self._state.notes(step, keeps_best=self._job.settings.evaluation.keeps_best)

    def close(self) -> None:
        self._progress.close()
        if self._trackers is not None:
            self._trackers.close()
