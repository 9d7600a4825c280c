"""What a node does in the training step: fetch its inputs, run its part of the gang, hand over results."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decorators.gpu_profile import current_profile
from decorators.measured import Measured
from decorators.storage import MetaflowStorage
from estimator.errors import UserError
from estimator.plan import Plan
from flows.handover import local_copy, model_folder
from launchers import engines
from launchers.bundles import put_bundle
from launchers.checkpoints import Checkpoint, CheckpointStore, restore_newest
from launchers.dataset.prepared import Prepared
from launchers.gang import NodeAddress, run_node
from launchers.job import TrainJob
from launchers.metrics import Meter, Metrics, dist_lines, step_line, tokens_of_steps
from launchers.settings import Settings
from launchers.telemetry import DistInfo, Event, Phase
from launchers.trackers import Trackers

CLUSTER_PORTS = tuple(range(29400, 29408))  # a pod has its own network, so these are free there


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the earlier steps have made; the same on every node."""

    plan: Plan
    settings: Settings
    model: str  # a folder on this machine, or the key of a bundle
    data: str  # the key of a bundle
    run_id: str
    attempt: int
    origin_run_ids: tuple[str, ...]  # earlier runs whose checkpoints may be gone on from


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one node hands over."""

    measured: Measured
    metrics: tuple[Metrics, ...]  # of all steps, those before resumed_from too, on node 0; empty elsewhere
    resumed_from: int  # the step gone on from; 0: from the start
    output: str | None  # key of the finished model's bundle, on node 0
    logs: str  # key of the bundle of this node's logs


def choose_ports(*, local: bool) -> tuple[int, ...]:
    """Ports where the nodes' tasks may meet: free ones where they share this machine's network."""
    if not local:
        return CLUSTER_PORTS
    found = []
    for _ in range(8):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            found.append(probe.getsockname()[1])
    return tuple(dict.fromkeys(found))


def train_on_node(inputs: Inputs, address: NodeAddress, store: MetaflowStorage, work: Path) -> Outcome:
    """Train as one node of the gang; returns when all nodes are done, raises when any has failed."""
    profile = current_profile()
    data_dir = local_copy(store, inputs.data, work / "data")
    data = Prepared(data_dir)
    total_steps = data.info.total_steps
    profile.expect(total_steps=total_steps)
    listener = _Listener(inputs, total_steps, tokens_of_steps(data))
    # Checkpoints of other data or settings are not this job's: they lie under another name.
    checkpoints = CheckpointStore(
        store,
        f"checkpoints/{inputs.run_id}/{data.info.fingerprint}",
        attempt=inputs.attempt,
        origins=[f"checkpoints/{run}/{data.info.fingerprint}" for run in inputs.origin_run_ids],
        keep=inputs.settings.keep_checkpoints,
        notes=listener.notes,
    )
    checkpoint, skipped = restore_newest(checkpoints, work / "resume")
    for line in skipped:
        print(f"a checkpoint can't be used: {line}")
    if checkpoint and address.node == 0:
        print(f"going on from the checkpoint of step {checkpoint.step} of {total_steps}", flush=True)
        listener.go_on_from(checkpoint)
    job = TrainJob(
        plan=inputs.plan,
        settings=inputs.settings,
        model_dir=model_folder(inputs.model, work / "model"),
        data_dir=data_dir,
        work_dir=work / "node",
        total_steps=total_steps,
        checkpoint_every=inputs.settings.checkpoint_every,
        start_step=checkpoint.step if checkpoint else 0,
        resume_dir=work / "resume" if checkpoint else None,
    )
    logs = f"logs/{inputs.run_id}/attempt-{inputs.attempt}/node-{address.node}"
    try:
        run_node(job, address, on_event=listener, checkpoints=checkpoints)
    finally:
        listener.close()
        _keep_logs(store, logs, job.logs_dir)
    output = None
    if address.node == 0:
        output = f"models/{inputs.run_id}"
        engines.get(inputs.plan.engine).collect(job, work / "finished")
        put_bundle(store, output, work / "finished")
    return Outcome(
        measured=profile.measured(),
        metrics=tuple(listener.metrics),
        resumed_from=job.start_step,
        output=output,
        logs=logs,
    )


def _keep_logs(store: MetaflowStorage, key: str, folder: Path) -> None:
    """Every rank's logs into the datastore; a failure to do so must not hide why the run has failed."""
    if not folder.is_dir():
        return
    try:
        put_bundle(store, key, folder)
    except (UserError, OSError) as error:
        print(f"the ranks' logs could not be kept: {error}")


class _Listener:
    """Hears every telemetry event of this node: for the profile and the card, the terminal, trackers."""

    def __init__(self, inputs: Inputs, total_steps: int, tokens: Sequence[int]) -> None:
        self.metrics: list[Metrics] = []
        self._inputs = inputs
        self._meter = Meter(inputs.plan, tokens)
        self._total_steps = total_steps
        self._ranks: list[DistInfo] = []
        self._profile = current_profile()
        self._trackers: Trackers | None = None

    def __call__(self, event: Event) -> None:
        self._profile.add(event)
        if isinstance(event, DistInfo):
            self._ranks.append(event)
            if len(self._ranks) == self._inputs.plan.layout.processes_per_node:
                # In one write: local nodes share their output.
                print("\n".join([*dist_lines(self._ranks), ""]), end="", flush=True)
        elif isinstance(event, Phase) and event.rank == 0 and event.name in ("checkpoint", "save"):
            print(f"{event.name} after step {event.step}" if event.step else event.name, flush=True)
        metrics = self._meter.add(event)
        if metrics is not None:
            self.metrics.append(metrics)
            print(step_line(metrics, self._total_steps), flush=True)
            self._track(metrics)

    def _track(self, metrics: Metrics) -> None:
        if self._trackers is None:
            settings = self._inputs.settings
            folder = Path(settings.output_dir).expanduser() / "trackers"
            self._trackers = Trackers(settings, run_name=self._inputs.run_id, folder=folder)
        self._trackers.log(metrics)

    def notes(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps of the run so far: the metrics up to its step."""
        return {"metrics": [metrics.to_dict() for metrics in list(self.metrics) if metrics.step <= step]}

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Take over the metrics of the steps that an earlier attempt or run has made."""
        self.metrics = [Metrics(**values) for values in checkpoint.extra.get("metrics", ())]

    def close(self) -> None:
        if self._trackers is not None:
            self._trackers.close()
