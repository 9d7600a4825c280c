"""Preparation by node 0 of a scheduler's job for all nodes: plan, weights and data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator import models
from estimator.errors import UserError
from estimator.formatting import format_count
from estimator.job import Machine, Target
from estimator.models import ModelRef
from estimator.plan import Plan
from estimator.planning.report import render
from estimator.terminal import print
from estimator.vocabulary import TASKS
from launchers.engines.reward_head import as_trained
from launchers.harness import tasks
from launchers.harness.run import try_tasks
from launchers.results import hub_push
from launchers.results.model_card import slug
from launchers.run import checks, preparation
from launchers.run.preparation import PlannedRun
from launchers.run_config import RunConfig
from launchers.scoring.functions import scorer_of
from launchers.scoring.reward_model import check_reward_model
from launchers.settings import Settings

# Settings that may change when a run is resumed; those of the data are part of its fingerprint
_FREE = {"resources", "evaluation", "tracker", "output_dir", "keep_checkpoints", "checkpoint_every"}
_FREE |= {"harness", "export", "dataset", "micro_batch_size", "activation_checkpointing", "automatic_choices"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One attempt, as prepared by node 0 for all nodes."""

    secret: str  # shared secret with which the nodes authenticate
    attempt: int
    key: str  # hash of the settings: checkpoints are reused only with the same key
    plan: Plan
    settings: RunConfig
    model: ModelRef
    model_dir: Path
    data_dir: Path
    reward: str | None = None  # reward of task grpo, see TrainJob.reward

    def to_json(self) -> str:
        """Convert to JSON text, for a file that node 0 writes and the other nodes read once."""
        values: dict[str, Any] = {
            name: getattr(self, name) for name in ("secret", "attempt", "key", "reward")
        }
        values |= {"model_dir": str(self.model_dir), "data_dir": str(self.data_dir)}
        values |= {"plan": self.plan.to_dict(), "settings": self.settings.model_dump(mode="json")}
        values["model"] = self.model.to_dict()
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Start:
        """Restore a start from :meth:`to_json`."""
        values = json.loads(text)
        return cls(
            **{name: values[name] for name in ("secret", "attempt", "key", "reward")},
            plan=Plan.from_json(json.dumps(values["plan"])),
            settings=RunConfig.model_validate(values["settings"]),
            model=ModelRef.from_dict(values["model"]),
            model_dir=Path(values["model_dir"]),
            data_dir=Path(values["data_dir"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """Hardware of a node, reported by the node."""

    name: str
    machine: Machine

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Host:
        """Restore a host from :meth:`to_dict`, after a round trip through JSON."""
        machine = dict(values["machine"])
        gpus = tuple((str(name), int(size)) for name, size in machine.pop("gpus"))
        return cls(name=str(values["name"]), machine=Machine(gpus=gpus, **machine))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON-compatible values."""
        return dataclasses.asdict(self)


def plan_for_hosts(settings: Settings, hosts: Sequence[Host], *, calibrated: bool = True) -> PlannedRun:
    """Plan for these nodes, which all get the same share of the work.

    Raises UserError (or its subclass CannotFit).
    """
    nodes = settings.resources.nodes
    if nodes is not None and nodes != len(hosts):
        raise UserError(
            f"resources.nodes: {nodes} are requested, this job has {format_count(len(hosts), 'node')}.",
            "Leave resources.nodes empty, or request that number from the scheduler.",
        )
    machine = smallest([host.machine for host in hosts])
    target = Target(kind="allocation", machine=machine, nodes=len(hosts))
    planned = preparation.plan_run(settings, target, calibrated=calibrated)
    chosen = planned.settings
    checks.check_installed(chosen.engine, chosen.method, liger=chosen.liger)
    tasks.check_installed(chosen)
    hub_push.check(chosen, must_reach=True)
    disks = [(f"The work folder of {host.name}", host.machine.disk_free_bytes) for host in hosts]
    checks.check_disks(planned.plan, disks)
    return planned


def smallest(machines: Sequence[Machine]) -> Machine:
    """Return the common minimum of these machines: fewest GPUs, smallest memory of each kind."""
    fewest = min(
        machines, key=lambda machine: (len(machine.gpus), min((m for _, m in machine.gpus), default=0))
    )
    return Machine(
        gpus=fewest.gpus,
        cpu_cores=min(machine.cpu_cores for machine in machines),
        ram_bytes=min(machine.ram_bytes for machine in machines),
        disk_free_bytes=min(machine.disk_free_bytes for machine in machines),
    )


def prepare_start(
    settings: Settings, hosts: Sequence[Host], folder: Path, *, cache: Path | None, calibrated: bool
) -> Start:
    """Plan, fetch the weights and tokenize the data into the shared ``folder``, for all nodes.

    Raises UserError.
    """
    planned = plan_for_hosts(settings, hosts, calibrated=calibrated)
    model, settings = planned.model, planned.settings
    print(render(planned.plan), flush=True)
    with tempfile.TemporaryDirectory(prefix="harness-", dir=folder) as trial_dir:
        try_tasks(settings, Path(trial_dir))
    rows, held_out = preparation.read_data(settings, folder)
    weights_dir = (cache or folder / "weights") / slug(model.location or model.name)
    vision = settings.vision is not None
    model_dir = preparation.fetch_weights(
        model, weights_dir, vision=vision, trust_remote_code=settings.trust_remote_code
    )
    attempt = _next_attempt(folder)
    data_dir = folder / f"data-{attempt}"
    shutil.rmtree(data_dir, ignore_errors=True)
    model_dir = as_trained(model_dir, settings, folder)
    info = preparation.tokenize(rows, held_out, settings, model_dir, data_dir)
    reward = _fetch_reward(settings, folder, cache=cache)
    return Start(
        secret=secrets.token_hex(32),
        attempt=attempt,
        key=_key(settings),
        plan=planned.plan,
        settings=settings.with_checkpoint_interval(info.total_steps),
        model=model,
        model_dir=model_dir.resolve(),
        data_dir=data_dir.resolve(),
        reward=reward,
    )


def _fetch_reward(settings: RunConfig, folder: Path, *, cache: Path | None) -> str | None:
    """Make the reward available to all nodes: copy a function's file, or fetch a reward model."""
    reward = settings.rl.reward
    if not TASKS[settings.task].draws_answers or reward is None:
        return None
    scorer = scorer_of(reward)
    if scorer.file is not None:
        copied = folder / "reward" / Path(scorer.file).name
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(scorer.file).expanduser(), copied)
        return f"{copied.resolve()}:{scorer.function}"
    if scorer.function is not None:
        return reward
    source = models.locate(reward)
    weights_dir = (cache or folder / "weights") / slug(source.location or source.name)
    fetched = preparation.fetch_weights(source, weights_dir, rewards=True).resolve()
    check_reward_model(fetched, "rl.reward", reward)
    return str(fetched)


def _key(settings: Settings) -> str:
    """Hash the settings that determine what is trained; equal for runs that may share checkpoints."""
    values = {name: value for name, value in settings.model_dump(mode="json").items() if name not in _FREE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _next_attempt(folder: Path) -> int:
    """Return the number of earlier attempts in this folder, and record this one."""
    notes = folder / "attempts"
    notes.mkdir(exist_ok=True)
    number = len(list(notes.iterdir()))
    (notes / f"{number:05d}").touch()
    return number
