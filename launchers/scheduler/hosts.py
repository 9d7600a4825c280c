"""What node 0 of a scheduler's job does before all train: plan, weights and data, once for all."""

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
from estimator.errors import UserError, spelled_as
from estimator.job import Machine, Target
from estimator.models import ModelRef
from estimator.plan import Plan
from estimator.planning.report import render
from estimator.vocabulary import TASKS
from launchers import checks, hub_push, pipeline
from launchers.engines.reward_head import as_trained
from launchers.harness import tasks
from launchers.harness.run import try_tasks
from launchers.model_card import slug
from launchers.pipeline import PlannedRun
from launchers.run_config import RunConfig
from launchers.scoring.functions import scorer_of
from launchers.scoring.reward_model import check_reward_model
from launchers.settings import Settings
from launchers.spelling import SET

# Settings that a run can be gone on from with other values; the data's own are in its fingerprint.
_FREE = {"resources", "evaluation", "tracker", "output_dir", "keep_checkpoints", "checkpoint_every"}
_FREE |= {"harness", "export", "dataset", "micro_batch_size", "activation_checkpointing"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One attempt, as node 0 has prepared it for all nodes."""

    secret: str  # what the nodes prove to each other that they have read
    attempt: int
    key: str  # of the run: with other settings, its checkpoints are not gone on from
    plan: Plan
    settings: RunConfig
    model: ModelRef
    model_dir: Path
    data_dir: Path
    reward: str | None = None  # what scores the answers of task grpo, as TrainJob has it

    def to_json(self) -> str:
        """As JSON text, for a file that node 0 writes and the other nodes read once."""
        values: dict[str, Any] = {
            name: getattr(self, name) for name in ("secret", "attempt", "key", "reward")
        }
        values |= {"model_dir": str(self.model_dir), "data_dir": str(self.data_dir)}
        values |= {"plan": self.plan.to_dict(), "settings": self.settings.model_dump(mode="json")}
        values["model"] = self.model.to_dict()
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> Start:
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
    """A node, as it describes itself."""

    name: str
    machine: Machine

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Host:
        machine = dict(values["machine"])
        gpus = tuple((str(name), int(size)) for name, size in machine.pop("gpus"))
        return cls(name=str(values["name"]), machine=Machine(gpus=gpus, **machine))

    def to_dict(self) -> dict[str, Any]:
        """For :meth:`from_dict`, through JSON."""
        return dataclasses.asdict(self)


def plan_for_hosts(settings: Settings, hosts: Sequence[Host], *, calibrated: bool = True) -> PlannedRun:
    """Plan for these nodes, which all get the same part of the work.

    Raises UserError (CannotFit is one) in the words of ``python -m launchers``.
    """
    with spelled_as(SET):
        nodes = settings.resources.nodes
        if nodes is not None and nodes != len(hosts):
            raise UserError(
                f"The settings ask for {nodes} node(s) (resources.nodes), this job has {len(hosts)}.",
                "Leave resources.nodes empty, or give the scheduler that number.",
            )
        machine = least([host.machine for host in hosts])
        target = Target(kind="allocation", machine=machine, nodes=len(hosts))
        planned = pipeline.plan_run(settings, target, calibrated=calibrated)
        chosen = planned.settings
        checks.check_installed(chosen.engine, chosen.method, liger=chosen.liger)
        tasks.check_installed(chosen)
        hub_push.check(chosen, must_reach=True)
        disks = [(f"The work folder of {host.name}", host.machine.disk_free_bytes) for host in hosts]
        checks.check_disks(planned.plan, disks)
        return planned


def least(machines: Sequence[Machine]) -> Machine:
    """What all of these have: the fewest GPUs, the smallest memory of each."""
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
    """Plan, fetch the weights, tokenise the data: all that the nodes need, in the shared ``folder``.

    Raises UserError in the words of ``python -m launchers``.
    """
    planned = plan_for_hosts(settings, hosts, calibrated=calibrated)
    model, settings = planned.model, planned.settings
    print(render(planned.plan), flush=True)
    with spelled_as(SET):
        with tempfile.TemporaryDirectory(prefix="harness-", dir=folder) as tried:
            try_tasks(settings, Path(tried))
        rows, held_out = pipeline.read_data(settings, folder)
        kept = (cache or folder / "weights") / slug(model.location or model.name)
        model_dir = pipeline.fetch_weights(model, kept)
        attempt = _next_attempt(folder)
        data_dir = folder / f"data-{attempt}"
        shutil.rmtree(data_dir, ignore_errors=True)
        model_dir = as_trained(model_dir, settings, folder)
        info = pipeline.tokenise(rows, held_out, settings, model_dir, data_dir)
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
    """What scores answers, where all nodes find it: a copy of a function's file, a reward model's folder."""
    shown = settings.rl.reward
    if not TASKS[settings.task].draws_answers or shown is None:
        return None
    scorer = scorer_of(shown)
    if scorer.file is not None:
        copied = folder / "reward" / Path(scorer.file).name
        copied.parent.mkdir(exist_ok=True)
        shutil.copyfile(Path(scorer.file).expanduser(), copied)
        return f"{copied.resolve()}:{scorer.function}"
    if scorer.function is not None:
        return shown
    source = models.locate(shown)
    kept = (cache or folder / "weights") / slug(source.location or source.name)
    fetched = pipeline.fetch_weights(source, kept, rewards=True).resolve()
    check_reward_model(fetched, "rl.reward", shown)
    return str(fetched)


def _key(settings: Settings) -> str:
    """A hash of the settings that decide what is trained; equal for runs that may share checkpoints."""
    values = {name: value for name, value in settings.model_dump(mode="json").items() if name not in _FREE}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _next_attempt(folder: Path) -> int:
    """How many attempts there have been in this folder; notes this one."""
    notes = folder / "attempts"
    notes.mkdir(exist_ok=True)
    number = len(list(notes.iterdir()))
    (notes / f"{number:05d}").touch()
    return number
