"""From settings to a job for the planner: what is decided, and what can be refused, before anything runs."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from estimator.changes import Text
from estimator.errors import Change, UserError
from estimator.job import Job, Target
from estimator.models import ModelSpec
from estimator.plan import GIB, Plan
from launchers import engines
from launchers.dataset import prepare, rows, sources
from launchers.models import weights
from launchers.models.files import check_complete
from launchers.report import trackers
from launchers.settings import Settings

DEFAULT_SEQ_LEN = 2048
TINY_SEQ_LEN = 256  # tiny-llama's own data is short; a plan for 2048 would foretell memory it never needs
PACKAGES = {  # what an engine's processes import, beside the base install
    "torchtune": ("torch", "torchtune", "torchao", "transformers"),
    "deepspeed": ("torch", "deepspeed", "accelerate", "peft", "transformers"),
}

# tiny-llama starts from random weights, so it wants far larger steps than a trained model.
_LEARNING_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
_TINY_LEARNING_RATES = {"full": 3e-3, "lora": 5e-3, "qlora": 5e-3}


def resolved(wanted: Settings, spec: ModelSpec, steps: int | None = None) -> Settings:
    """The same settings with every ``auto`` that depends on the model decided."""
    tiny = spec.name == weights.TINY
    rates = _TINY_LEARNING_RATES if tiny else _LEARNING_RATES
    optimizer = wanted.optimizer
    if optimizer.lr == "auto":
        optimizer = optimizer.model_copy(update={"lr": rates[wanted.method]})
    changes: dict[str, object] = {"optimizer": optimizer}
    if wanted.seq_len is None:
        changes["seq_len"] = min(TINY_SEQ_LEN if tiny else DEFAULT_SEQ_LEN, spec.max_seq_len)
    if wanted.checkpoint_every == 0 and steps is not None:
        changes["checkpoint_every"] = max(10, round(steps / 10))
    return wanted.model_copy(update=changes)


def check(
    wanted: Settings,
    spec: ModelSpec,
    *,
    otherwise: Text = "See the table of what runs where in docs/methods.md.",
) -> None:
    """Raise UserError for what the engine can't do."""
    trackers.check_installed(wanted.tracker)
    reason = engines.get(wanted.engine).unsupported(wanted, spec)
    if reason is not None:
        other = next(name for name in engines.ENGINES if name != wanted.engine)
        can = engines.get(other).unsupported(wanted, spec) is None
        asked = [Change(name, getattr(wanted, name)) for name in ("model", "method", "engine")]
        raise UserError(
            (asked[0], " ", asked[1], " ", asked[2], f": {reason}."),
            ("Use ", Change("engine", other), ".") if can else otherwise,
        )
    seq_len = wanted.seq_len or DEFAULT_SEQ_LEN
    if seq_len > spec.max_seq_len:
        raise UserError(
            (Change("seq_len", seq_len), f": {spec.name} takes at most {spec.max_seq_len} tokens."),
            ("Use ", Change("seq_len", spec.max_seq_len), " or less."),
        )


def check_files(wanted: Settings) -> None:
    """Raise UserError where a local model folder or held-out file can't be used."""
    ref = weights.resolve(wanted.model)
    if ref.kind == "local":
        check_complete(Path(ref.location))
    if wanted.evaluation.dataset and sources.kind_of(wanted.evaluation.dataset) == "path":
        rows.read(Path(wanted.evaluation.dataset).expanduser())


def check_planned(wanted: Settings, made: Plan, spec: ModelSpec) -> None:
    """The same check with the plan's nodes and GPUs: some things an engine can't do depend on them."""
    planned = {"nodes": made.layout.nodes, "gpus": made.layout.processes_per_node}
    resources = wanted.resources.model_copy(update=planned)
    fewer = ("Ask for fewer GPUs: ", Change("resources.gpus", 1), ".")
    check(wanted.model_copy(update={"resources": resources}), spec, otherwise=fewer)


def check_installed(engine: str) -> None:
    """Raise UserError where an engine's packages are not here."""
    missing = [name for name in PACKAGES[engine] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: this machine can "
            f"plan, but not train with {engine}.",
            "pip install -e '.[train]'",
        )


def known_steps(wanted: Settings) -> int | None:
    """Optimizer steps, where the data is at hand already; reading it also refuses broken data."""
    if sources.kind_of(wanted.dataset) != "path":
        return wanted.max_steps
    train, _ = prepare.split(rows.read(sources.fetch(wanted.dataset, Path())), wanted)
    steps = max(1, len(train) * wanted.epochs // wanted.global_batch_size)
    return min(steps, wanted.max_steps or steps)


def job_of(wanted: Settings, spec: ModelSpec, steps: int | None) -> Job:
    """What is to be trained, as the planner wants it."""
    checkpointing = wanted.activation_checkpointing
    stage = wanted.zero.stage
    return Job(
        model=spec,
        method=wanted.method,
        engine=wanted.engine,
        seq_len=wanted.seq_len or DEFAULT_SEQ_LEN,
        global_batch_size=wanted.global_batch_size,
        micro_batch_size=wanted.micro_batch_size,
        optimizer=wanted.optimizer.name,
        precision=wanted.precision,
        activation_checkpointing=None if checkpointing == "auto" else checkpointing,
        lora_rank=wanted.lora.rank,
        lora_targets=wanted.lora.targets,
        packing=wanted.packing,
        compile=wanted.compile,
        zero_stage=None if stage == "auto" else stage,
        offload=wanted.zero.offload,
        steps=steps,
    )


def target_of(wanted: Settings, target: Target) -> Target:
    """``target`` with what the settings ask for."""
    asked = wanted.resources
    return dataclasses.replace(
        target,
        nodes=asked.nodes if asked.nodes is not None else target.nodes,
        gpus=asked.gpus,
        gpu=asked.gpu,
        instance_type=asked.instance_type,
        cloud=asked.cloud,
        device=asked.device,
    )


def one_line(made: Plan) -> str:
    """The plan in a line, for the log of a task."""
    layout, memory = made.layout, made.prediction.memory
    what = f"{made.request.gpus_per_node}x {made.request.gpu}" if made.request.gpu else "CPU"
    return (
        f"plan: {made.model}, {made.method} with {made.engine}, {layout.nodes} node(s) of {what}, "
        f"{layout.sharding}, micro batch {layout.micro_batch_size} x {layout.accumulation}, "
        f"{memory.likely_bytes / GIB:.2f} GiB (up to {memory.upper_bytes / GIB:.2f}) a process"
    )
