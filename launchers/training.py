"""One node's training: go on from the newest checkpoint, run its part of the gang, keep its logs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.plan import Plan
from estimator.vocabulary import TASKS
from launchers import latents, reference
from launchers.cluster.endpoint import NodeAddress
from launchers.dataset.measured import MAX_ROWS
from launchers.dataset.prepared import Prepared
from launchers.export_best import export_best, has_ended, last_step
from launchers.gang.departure import NO_GRACE, Grace
from launchers.gang.failures import GangFailed
from launchers.gang.job import TrainJob
from launchers.gang.node import run_node
from launchers.replanning import Replanning, after_kill, choose_plan, out_of_memory
from launchers.report.evaluations import HeldOutLoss, evaluation_line, handed_over, is_over, why_over
from launchers.report.metrics import Metrics, dist_lines, tokens_of_steps
from launchers.report.peak import MemoryPeak
from launchers.report.progress import Progress
from launchers.report.state import RunState
from launchers.report.stragglers import Stragglers, words
from launchers.report.telemetry import DistInfo, Evaluated, Event, Pace, Phase, Profiled, Step
from launchers.report.trackers import Trackers
from launchers.report.window import Window, lines
from launchers.store.bundles import Storage, put_bundle
from launchers.store.checkpoints import CheckpointStore, restore_newest
from launchers.trial import TrialResult, find_decision, run_trials

_EVALUATING_S = 10.0  # from one line to the next that says that an evaluation is under way


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a run: where it keeps what it leaves, and what it may go on from."""

    run: str  # its name for people and trackers
    number: int
    checkpoints: str  # key below which this run's checkpoints lie
    origins: tuple[str, ...] = ()  # the same of runs that may be gone on from, nearest first
    logs: str  # key of the bundle of this node's logs
    profile: str  # key below which the traces of this node's ranks lie
    plans: str | None = None  # key below which attempts leave plans for later ones; None: all have the same
    granted: Plan | None = None  # by which this attempt's machines were asked for; None: by the job's plan
    other_machines: bool = False  # whether a later attempt can be given another GPU
    killed: str | None = None  # what of the attempt before was ended as a whole for want of memory, if known


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What one node's training hands to the steps after it."""

    job: TrainJob  # its plan is the one that this attempt went by
    metrics: tuple[Metrics, ...]  # of all steps, those before resumed_from too, on node 0; empty elsewhere
    memory_peak: MemoryPeak | None  # of this node's largest process since it started; None: not reported
    windows: tuple[Window, ...] = ()  # profiled by this node's ranks
    evaluations: tuple[HeldOutLoss, ...] = ()  # while it trained, those before resumed_from too
    exported_step: int  # whose model is the result

    @property
    def resumed_from(self) -> int:
        """The step gone on from; 0: from the start."""
        return self.job.start_step

    @property
    def exported(self) -> list[tuple[str, str]]:
        """Rows of (what, value): which step the result is, of a run that was evaluated."""
        last, settings = last_step(self.job, self.evaluations), self.job.settings.evaluation
        return handed_over(self.evaluations, settings, exported=self.exported_step, last_step=last)


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
) -> Trained:
    """Train as one node of the gang; returns when all nodes are done, raises when any has failed.

    After an attempt that ran out of memory, the next takes a plan that needs less.

    Parameters
    ----------
    job:
        As it was launched; the plan that this attempt goes by, and the checkpoint that it goes on from, are
        found here.
    store:
        Takes checkpoints and logs.
    work:
        A folder of this node's own.
    state:
        Receives this attempt's plan and every telemetry event of the node's ranks. None: a new one.
    on_event:
        Called with every telemetry event after ``state`` has it.
    on_trial:
        Is told each trial's result, on the first node (``job.settings.trial``).
    grace:
        Signals after which a checkpoint is stored before this node ends.

    Raises
    ------
    UserError, GangFailed, SystemExit
        As :func:`launchers.gang.node.run_node` does.
    """
    launched = job.plan
    job = with_reference(job, address, store, work)
    plans = Replanning(storage=store, prefix=attempt.plans) if attempt.plans is not None else None
    if job.settings.trial:
        job = replace(job, plan=_tried_plan(job, attempt, address, store, plans, on_trial))
    if plans is not None:
        say = print if address.node == 0 else _quiet
        job = replace(job, plan=_choose_plan(plans, job, attempt, say))
    data = Prepared(job.data_dir)
    state = state if state is not None else RunState()
    state.plan, state.total_steps = job.plan, job.total_steps
    # What is generated while training is counted by rank 0, not by the prepared prompts
    state.tokens_of_steps = None if TASKS[job.settings.task].draws_answers else tokens_of_steps(data)
    reporter = _Reporter(job, attempt.run, state, _Traces(store, attempt.profile), on_event, address.node)
    # Checkpoints of other data or settings are not this job's: they lie under another name.
    fingerprint = data.info.fingerprint
    if job.plan.engine == "deepspeed" and job.plan.layout.sharding != launched.layout.sharding:
        fingerprint += f"-{job.plan.layout.sharding}"  # DeepSpeed can't go on from another ZeRO stage's
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
        print(f"a checkpoint can't be used: {line}")
    if checkpoint and address.node == 0:
        print(f"going on from the checkpoint of step {checkpoint.step} of {job.total_steps}", flush=True)
    if checkpoint:
        state.restore(checkpoint.extra, with_metrics=address.node == 0)
        job = replace(
            job, start_step=checkpoint.step, resume_dir=work / "resume", evaluations=state.evaluations
        )
        if address.node == 0:
            _say_what_is_past(job)
    try:
        if not has_ended(job):
            run_node(job, address, on_event=reporter, checkpoints=checkpoints, grace=grace)
        exported = export_best(job, state.evaluations, address, checkpoints, work / "best", reporter)
    except GangFailed as error:
        if plans is not None and error.failure.out_of_memory:
            _plan_less(plans, attempt, job, address)
        raise
    finally:
        reporter.close()
        _keep_logs(store, attempt.logs, job.logs_dir)
        reporter.traces.keep(job.profile_dir)
    return Trained(
        job=job,
        metrics=state.metrics,
        memory_peak=state.memory_peak,
        windows=state.windows,
        evaluations=state.evaluations,
        exported_step=exported,
    )


def with_reference(job: TrainJob, address: NodeAddress, store: Storage, work: Path) -> TrainJob:
    """The job with what is computed once before it: by all nodes together, or found in ``store``.

    Raises UserError and RankFailed as :func:`launchers.parts.fetch` does.
    """
    learns_images = TASKS[job.settings.task].images
    if not learns_images and not reference.is_needed(job):
        return job
    fetch = latents.fetch if learns_images else reference.fetch
    job = replace(job, reference=fetch(job, address, store, work / "reference"))
    if not job.evaluates:
        return job
    held_out = replace(job, data_dir=job.held_out_dir)
    found = fetch(held_out, address, store, work / "held-out", max_rows=MAX_ROWS)
    return replace(job, held_out_reference=found)


def _plan_less(plans: Replanning, attempt: Attempt, job: TrainJob, address: NodeAddress) -> None:
    """After running out of memory: leave a plan that needs less for the next attempt, and say so."""
    line = out_of_memory(
        plans,
        attempt.number,
        job.plan,
        job.settings,
        job.model.spec,
        other_machines=attempt.other_machines,
    )
    if address.node == 0:
        print(line, flush=True)


def _tried_plan(
    job: TrainJob,
    attempt: Attempt,
    address: NodeAddress,
    store: Storage,
    plans: Replanning | None,
    on_trial: Callable[[TrialResult], None],
) -> Plan:
    """The plan that this run's trials have chosen; they are made in its first attempt."""
    prefix = f"trials/{attempt.run}"
    decision = find_decision(store, prefix)
    if decision is None and attempt.number == 0:
        try:
            decision = run_trials(job, address, store, prefix, on_result=on_trial)
        except GangFailed as error:
            if plans is not None and error.failure.out_of_memory:
                _plan_less(plans, attempt, job, address)
            raise
    return job.plan if decision is None else decision.plan


def _choose_plan(plans: Replanning, job: TrainJob, attempt: Attempt, say: Callable[[str], None]) -> Plan:
    """This attempt's plan: the launched one, or a leaner one after an attempt that ran out of memory."""
    if attempt.killed is not None:
        say(
            after_kill(
                plans,
                attempt.number,
                job.plan,
                job.settings,
                job.model.spec,
                killed=attempt.killed,
                granted=attempt.granted,
            )
        )
    return choose_plan(plans, attempt.number, job.plan, granted=attempt.granted, say=say)


def _quiet(_: str) -> None:
    """Only node 0 speaks of what all nodes do."""


def _say_what_is_past(job: TrainJob) -> None:
    """Say so where the profiled window lies, wholly or partly, before the step that is gone on from."""
    first, last = job.settings.profile.window or (job.total_steps, job.total_steps)
    if job.start_step >= last:
        print(f"profile.steps {first}:{last} lies before step {job.start_step}: nothing is profiled")
    elif job.start_step >= first:
        print(f"profile.steps {first}:{last} has begun already: profiled from step {job.start_step + 1} on")


class _Traces:
    """Traces of a node's profiled windows, and their place in the store."""

    def __init__(self, store: Storage, key: str) -> None:
        self._store, self._key = store, key

    def placed(self, event: Profiled) -> Profiled:
        """Return the event with the future location of its window's files in the store."""
        if event.window is None:
            return event
        window = Window.from_dict(event.window)
        window = replace(
            window,
            trace=self._store.describe(f"{self._key}/{window.trace}"),
            snapshot=self._store.describe(f"{self._key}/{window.snapshot}") if window.snapshot else None,
        )
        return replace(event, window=window.to_dict())

    def keep(self, folder: Path) -> None:
        """Put the files into the store; a failure to do so must not hide why the run has failed."""
        try:
            for path in sorted(folder.glob("rank-*")):
                self._store.put_file(f"{self._key}/{path.name}", path)
        except (UserError, OSError) as error:
            print(f"the traces of the profiled window could not be kept: {error}")


def _keep_logs(store: Storage, key: str, folder: Path) -> None:
    """Every rank's logs into the store; a failure to do so must not hide why the run has failed."""
    if not folder.is_dir():
        return
    try:
        put_bundle(store, key, folder)
    except (UserError, OSError) as error:
        print(f"the ranks' logs could not be kept: {error}")


class _Reporter:
    """Adds this node's telemetry to the run's state, prints it, and sends its figures to the trackers."""

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
        self._progress_at = 0.0  # when an evaluation's progress was last printed
        self._on_event = on_event
        self._trackers: Trackers | None = None
        layout = job.plan.layout
        self._stragglers = Stragglers(layout.world_size, layout.processes_per_node)
        self._progress = Progress(total_steps=job.total_steps, every=job.settings.log_every)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Pace):
            for each in self._stragglers.add(event):
                on_gpus = self._job.plan.layout.device == "cuda"
                print(f"{'' if each.over else 'WARNING: '}{words(each, on_gpus=on_gpus)}", flush=True)
                self._add(each)
            return
        if isinstance(event, Profiled):
            event = self.traces.placed(event)
        ranks, evaluations = len(self._state.infos), len(self._state.evaluations)
        self._add(event)
        if isinstance(event, DistInfo):
            if ranks < len(self._state.infos) == self._job.plan.layout.processes_per_node:
                # In one write: local nodes share their output.
                print("\n".join([*dist_lines(self._state.infos), ""]), end="", flush=True)
        elif isinstance(event, Profiled):
            self._show(event)
        elif isinstance(event, Evaluated):
            if event.loss is None:
                self._show_progress(event)
            elif self._node == 0 and evaluations < len(self._state.evaluations):
                self._show_evaluation()
        elif isinstance(event, Phase) and event.rank == 0 and self._is_printed(event):
            print(f"{event.name} after step {event.step}" if event.step else event.name, flush=True)
        elif isinstance(event, Step) and event.loss is not None:
            metrics, peak = self._state.step(event.step), self._state.memory_peak
            self._progress.step(metrics, None if peak is None else peak.size_bytes)
            self._track(metrics.step, metrics.figures())

    def _add(self, event: Event) -> None:
        self._state.add(event)
        self._on_event(event)

    def _is_printed(self, event: Phase) -> bool:
        """Whether the log has a line for this phase of rank 0."""
        return event.name == "save" or (event.name == "checkpoint" and self._progress.prints_checkpoint())

    def _show(self, event: Profiled) -> None:
        if event.window is None:
            print(f"WARNING: rank {event.rank} could not be profiled: {event.problem}", flush=True)
            return
        window = Window.from_dict(event.window)
        text = [
            *lines(window, self._job.plan.prediction),
            f"  trace, when the run has ended: {window.trace}",
            "",
        ]
        print("\n".join(text), end="", flush=True)  # in one write: local nodes share their output

    def _show_progress(self, event: Evaluated) -> None:
        if event.rank == 0 and event.at - self._progress_at >= _EVALUATING_S:
            self._progress_at = event.at
            print(f"evaluating after step {event.step}: {event.done} of {event.rows} rows", flush=True)

    def _show_evaluation(self) -> None:
        losses, settings = self._state.evaluations, self._job.settings
        print(evaluation_line(losses), flush=True)
        if is_over(losses, settings.evaluation):
            print(why_over(losses, settings.evaluation), flush=True)
        self._track(losses[-1].step, losses[-1].figures(settings.task))

    def _track(self, step: int, figures: dict[str, float]) -> None:
        if self._trackers is None:
            settings = self._job.settings
            folder = Path(settings.output_dir).expanduser() / "trackers"
            self._trackers = Trackers(settings, run_name=self._run, folder=folder)
        self._trackers.log(step, figures)

    def notes(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint of this step keeps of the run."""
        return self._state.notes(step, keeps_best=self._job.settings.evaluation.keeps_best)

    def close(self) -> None:
        self._progress.close()
        if self._trackers is not None:
            self._trackers.close()
