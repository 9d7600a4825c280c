"""Training step of one node: fetch inputs, train, store results."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from metaflow import current

from decorators._metaflow import in_container, leave_no_record, limit_failures
from decorators.backends import disruptions
from decorators.backends.cluster_name import cluster_name, current_cluster
from decorators.backends.kubernetes.pod_shape import PID_FILE
from decorators.card.state import Setting
from decorators.gpu_profile import current_plan, current_profile
from decorators.profile.calibration import store_trial
from decorators.profile.measured import Measured
from decorators.storage import MetaflowStorage, origin_run_ids
from estimator.models import ModelRef
from estimator.plan import Plan
from estimator.terminal import print
from flows.finetune.artifacts import fetch_bundle, fetch_model
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.cluster.processes import rank_log_tail
from launchers.dataset.prepared import Prepared
from launchers.engines.reward_head import as_trained
from launchers.gang.departure import NO_GRACE, Grace
from launchers.gang.failures import GangFailed, NodeLost
from launchers.gang.job import TrainJob
from launchers.report.evaluations import HeldOutLoss
from launchers.report.metrics import Metrics
from launchers.report.state import RunState
from launchers.report.telemetry import Event, Straggling
from launchers.report.window import Window
from launchers.results import handover
from launchers.run.replanning import Replanning, plans_key
from launchers.run.training import Attempt, train, with_reference
from launchers.run.trial import TrialResult
from launchers.run_config import RunConfig
from launchers.settings import Settings, flat
from launchers.store.bundles import put_bundle

_LOCAL_S = 300.0  # join timeout of tasks on one machine
_LAUNCH_FIRST_S = 60.0
DEPLOYED = ("argo-", "sfn-")  # prefixes of Metaflow's run ids


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one node's training task for the later steps."""

    plan: Plan  # plan of the attempt; differs from the launched plan after an attempt ran out of memory
    measured: Measured
    metrics: tuple[Metrics, ...]  # of all steps, including those before resumed_from; empty except on node 0
    resumed_from: int  # step that the attempt resumed from; 0: from the start
    output: str | None  # key of the finished model's bundle, on node 0
    logs: str  # key of the bundle of this node's logs
    tried: tuple[TrialResult, ...] = ()  # trials before the run, on node 0
    windows: tuple[Window, ...] = ()  # profiled windows of this node's ranks, with the paths of their traces
    evaluations: tuple[HeldOutLoss, ...] = ()  # during training
    exported: tuple[tuple[str, str], ...] = ()  # rows of (name, value) on the exported step

    @property
    def finished_model(self) -> str:
        """Key of the finished model's bundle; only node 0's outcome has it."""
        if self.output is None:
            raise ValueError("only node 0 has the finished model")
        return self.output


def join_timeout_s(settings: RunConfig) -> float:
    """Return how long nodes wait for the next node to join, in seconds.

    On a cluster slightly longer than the launching process waits, which knows the reason and should fail
    first.
    """
    return settings.resources.pending_timeout * 60 + _LAUNCH_FIRST_S if in_container() else _LOCAL_S


def train_on_node(
    *,
    plan: Plan,
    settings: RunConfig,
    model: ModelRef,
    weights: str,
    data: str,
    address: NodeAddress,
    launch: int,
    store: MetaflowStorage,
    work_dir: Path,
    reward: str | None = None,
) -> Outcome:
    """Train as one node of the gang; returns when all nodes are done, raises when any has failed.

    Parameters
    ----------
    weights:
        A folder on this machine, or the key of a bundle.
    data:
        The key of the bundle of tokenized data.
    launch:
        The launch number of the step.
    store:
        The run's storage: source of the data, destination of checkpoints, logs and the finished model.
    reward:
        Scorer of answers on this machine: see flows/finetune/scorers.py.
    """
    profile = current_profile()
    job = _job(plan, settings, model, weights, data, store, work_dir, reward=reward)
    state = RunState(plan, total_steps=job.total_steps)
    profile.follow(state)
    profile.describe(_setting_texts(settings), lambda: rank_log_tail(job.logs_dir))
    attempt = _this_attempt(store, node=address.node, number=launch)
    disrupted = disruptions.Disruptions(storage=store, run=attempt.run)
    for disruption in disrupted.of_step(current.step_name):
        profile.note(f"Disrupted: {disruption.text}")
    trials: list[TrialResult] = []

    def note_trial(result: TrialResult) -> None:
        trials.append(result)
        profile.trial(result)
        run_name = f"{current.pathspec}/trial-{len(trials)}"
        if problem := store_trial(result, run=run_name, in_container=in_container()):
            print(problem, file=sys.stderr, flush=True)

    joined = False

    def note_event(event: Event) -> None:
        nonlocal joined
        joined = True
        if isinstance(event, Straggling):
            cluster = current_cluster() or cluster_name("local")
            on_gpus = plan.layout.device == "cuda"
            from flows.cluster_check import suspicions  # slow to import, and rarely needed

            suspicions.record(event, cluster=cluster, run=current.run_id, on_gpus=on_gpus)

    try:
        with _grace_period(settings) as grace_period:
            trained = train(
                job,
                attempt,
                address,
                store,
                work_dir,
                state=state,
                on_event=note_event,
                on_trial=note_trial,
                grace=grace_period,
            )
    except GangFailed as error:
        if joined and in_container():  # a node that never joined was not disrupted
            disrupted.record_gang_end(current.step_name, launch, error.failure)
            if isinstance(error, NodeLost):
                leave_no_record()
            else:
                limit_failures(current.step_name, disrupted.failures(current.step_name, launch + 1))
        raise
    except SystemExit:  # SIGTERM before the first step, or after the time to store a checkpoint
        leave_no_record()
        raise
    profile.exported(trained.exported)
    output = None
    if address.node == 0:
        output = f"models/{attempt.run}"
        handover.collect(trained.job, work_dir / "finished")
        put_bundle(store, output, work_dir / "finished")
    return Outcome(
        plan=trained.job.plan,
        measured=profile.measured(),
        metrics=trained.metrics,
        resumed_from=trained.resumed_from,
        output=output,
        logs=attempt.logs,
        tried=tuple(trials),
        windows=trained.windows,
        evaluations=trained.evaluations,
        exported=tuple(trained.exported),
    )


def encode_on_node(
    *,
    plan: Plan,
    settings: RunConfig,
    model: ModelRef,
    weights: str,
    data: str,
    store: MetaflowStorage,
    work_dir: Path,
) -> None:
    """Compute latents and text embeddings of a run's images on this machine, and store them in ``store``.

    Parameters as for :func:`train_on_node`.
    """
    job = _job(plan, settings, model, weights, data, store, work_dir)
    address = NodeAddress(node=0, nodes=1, main_host="127.0.0.1", ports=(), secret=Secret(""), run="encode")
    with_reference(job, address, store, work_dir)


def _job(
    plan: Plan,
    settings: RunConfig,
    model: ModelRef,
    weights: str,
    data: str,
    store: MetaflowStorage,
    work_dir: Path,
    *,
    reward: str | None = None,
) -> TrainJob:
    """Build the training job, with weights and data on this machine."""
    data_dir = fetch_bundle(store, data, work_dir / "data")
    return TrainJob(
        plan=plan,
        settings=settings,
        model=model,
        model_dir=as_trained(fetch_model(weights, work_dir / "model"), settings, work_dir),
        data_dir=data_dir,
        work_dir=work_dir / "node",
        total_steps=Prepared(data_dir).info.total_steps,
        reward=reward,
    )


@contextmanager
def _grace_period(settings: RunConfig) -> Iterator[Grace]:
    """Yield the grace period of this task on eviction; the pod's preStop hook finds the task by a file."""
    seconds = settings.resources.termination_grace_s
    if not seconds or not in_container():
        yield NO_GRACE
        return
    pid = Path(tempfile.gettempdir()) / PID_FILE
    pid.write_text(str(os.getpid()))
    try:
        yield Grace(seconds=seconds, signals=(signal.SIGTERM,))
    finally:
        pid.unlink(missing_ok=True)


def _setting_texts(settings: RunConfig) -> list[Setting]:
    default = flat(Settings())
    return [Setting(name=name, value=value, default=default[name]) for name, value in flat(settings).items()]


def _this_attempt(store: MetaflowStorage, *, node: int, number: int) -> Attempt:
    """Return the attempt of this task, from Metaflow's run and step and the launch number."""
    run = current.run_id
    plans = Replanning(storage=store, prefix=plans_key(run))
    return Attempt(
        run=run,
        number=number,
        checkpoints=f"checkpoints/{run}",
        origins=tuple(f"checkpoints/{origin}" for origin in origin_run_ids()),
        logs=f"logs/{run}/attempt-{number}/node-{node}",
        profile=f"profile/{run}/attempt-{number}/node-{node}",
        plans=plans.prefix,
        requested_plan=current_plan(),
        # Steps of a deployed flow have fixed sizes
        other_machines=not run.startswith(DEPLOYED),
        killed=plans.killed_container(current.step_name, number - 1) if number else None,
    )
