"""What a node does in the training step: fetch its inputs, train, hand over results."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from metaflow import current

from decorators.gpu_profile import current_plan, current_profile
from decorators.profile.measured import Measured
from decorators.storage import MetaflowStorage
from estimator.plan import Plan
from flows.finetune_artifacts import local_copy, model_folder
from launchers import engines
from launchers.cluster.channel import NodeAddress
from launchers.dataset.prepared import Prepared
from launchers.replanning import Replanning, plans_of
from launchers.report.metrics import Metrics, tokens_of_steps
from launchers.settings import Settings
from launchers.store.bundles import put_bundle
from launchers.training import NodeInputs, train

CLUSTER_PORTS = tuple(range(29400, 29408))  # a pod has its own network, so these are free there
DEPLOYED = ("argo-", "sfn-")  # how Metaflow's ids of such runs begin


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

    plan: Plan  # that the attempt went by; another than the launched one after one that ran out of memory
    measured: Measured
    metrics: tuple[Metrics, ...]  # of all steps, those before resumed_from too, on node 0; empty elsewhere
    resumed_from: int  # the step gone on from; 0: from the start
    output: str | None  # key of the finished model's bundle, on node 0
    logs: str  # key of the bundle of this node's logs

    @property
    def finished_model(self) -> str:
        """Key of the finished model's bundle; only node 0's outcome has it."""
        if self.output is None:
            raise ValueError("the finished model is node 0's")
        return self.output


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
    data = Prepared(local_copy(store, inputs.data, work / "data"))
    profile.expect(total_steps=data.info.total_steps, tokens_of_steps=tokens_of_steps(data))
    plans = Replanning(storage=store, prefix=plans_of(inputs.run_id))
    logs = f"logs/{inputs.run_id}/attempt-{inputs.attempt}/node-{address.node}"
    trained = train(
        NodeInputs(
            plan=inputs.plan,
            settings=inputs.settings,
            model_dir=model_folder(inputs.model, work / "model"),
            data=data,
            run=inputs.run_id,
            attempt=inputs.attempt,
            checkpoints=f"checkpoints/{inputs.run_id}",
            origins=tuple(f"checkpoints/{run}" for run in inputs.origin_run_ids),
            logs=logs,
            plans=plans.prefix,
            granted=current_plan(),
            # A deployed flow's steps were sized once and for all
            other_machines=not inputs.run_id.startswith(DEPLOYED),
            killed=plans.kill_of(current.step_name, inputs.attempt - 1) if inputs.attempt else None,
        ),
        address,
        store,
        work,
        on_event=profile.add,
        on_plan=profile.replan,
    )
    output = None
    if address.node == 0:
        output = f"models/{inputs.run_id}"
        engines.get(trained.job.plan.engine).collect(trained.job, work / "finished")
        put_bundle(store, output, work / "finished")
    return Outcome(
        plan=trained.job.plan,
        measured=profile.measured(),
        metrics=trained.metrics,
        resumed_from=trained.resumed_from,
        output=output,
        logs=logs,
    )
