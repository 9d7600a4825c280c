"""From the flow's parameters to Settings and a Plan: all that can be known, and refused, before a run."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from estimator import calibration
from estimator.errors import UserError
from estimator.hardware import local_machine
from estimator.job import Job, Machine, Target
from estimator.models import ModelSpec
from estimator.plan import GIB, MIB, Plan
from estimator.planning.planner import CannotFit, plan
from estimator.planning.report import render, render_cannot_fit
from flows import staging, workdir
from launchers import engines, settings, trackers, weights
from launchers.dataset import prepare, rows, sources
from launchers.settings import Settings

Backend = Literal["local", "kubernetes", "batch"]

DEFAULT_SEQ_LEN = 2048
TINY_SEQ_LEN = 256  # tiny-llama's own data is short; a plan for 2048 would foretell memory it never needs
PACKAGES = {  # what an engine's processes import, beside the base install
    "torchtune": ("torch", "torchtune", "torchao", "transformers"),
    "deepspeed": ("torch", "deepspeed", "accelerate", "peft", "transformers"),
}

# Where each flag of the flow goes in Settings. Anything else is reached by the YAML file and --set.
FLAGS = {
    "model": "model",
    "method": "method",
    "launcher": "launcher",
    "dataset": "dataset",
    "seq_len": "seq_len",
    "packing": "packing",
    "epochs": "epochs",
    "max_steps": "max_steps",
    "batch_size": "batch_size",
    "micro_batch": "micro_batch",
    "lr": "optimizer.lr",
    "precision": "precision",
    "seed": "seed",
    "checkpoint_every": "checkpoint_every",
    "tracker": "tracker",
    "output_dir": "output_dir",
    "nodes": "resources.nodes",
    "gpus": "resources.gpus",
    "gpu": "resources.gpu",
    "instance_type": "resources.instance_type",
    "cloud": "resources.cloud",
    "device": "resources.device",
}

# tiny-llama starts from random weights, so it wants far larger steps than a trained model.
_LEARNING_RATES = {"full": 2e-5, "lora": 2e-4, "qlora": 2e-4}
_TINY_LEARNING_RATES = {"full": 3e-3, "lora": 5e-3, "qlora": 5e-3}


def settings_from(config: Mapping[str, Any], params: Mapping[str, Any]) -> Settings:
    """The settings file's values, the flags laid over them, ``--set`` over both.

    Raises UserError with one line for each wrong value, named as the user wrote it.
    """
    flags: dict[str, Any] = {}
    for flag, name in FLAGS.items():
        value = params.get(flag)
        if value in (None, ""):
            continue
        if flag == "tracker" and isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        flags[name] = value
    overrides = params.get("overrides") or params.get("set") or ()
    return settings.build(config, overrides, flags)


def resolved(wanted: Settings, spec: ModelSpec, steps: int | None = None) -> Settings:
    """The same settings with every ``auto`` that depends on the model decided."""
    tiny = spec.name == weights.TINY
    rates = _TINY_LEARNING_RATES if tiny else _LEARNING_RATES
    optimizer = wanted.optimizer
    if optimizer.lr == "auto":
        optimizer = optimizer.model_copy(update={"lr": rates[wanted.method]})
    changes: dict[str, Any] = {"optimizer": optimizer}
    if wanted.seq_len is None:
        changes["seq_len"] = min(TINY_SEQ_LEN if tiny else DEFAULT_SEQ_LEN, spec.max_seq_len)
    if wanted.checkpoint_every == 0 and steps is not None:
        changes["checkpoint_every"] = max(10, round(steps / 10))
    return wanted.model_copy(update=changes)


def plan_from_parameters(params: Mapping[str, Any], backend: Backend) -> Plan:
    """Plan the run that these parameters ask for, or raise UserError before anything is asked for.

    ``params`` are the flow's parameters by name, and under "settings" the settings file's values.
    ``--no-calibration`` leaves out what finished runs have measured. ``--plan-only`` prints the plan and ends
    the program here.
    """
    wanted = settings_from(params.get("settings") or {}, params)
    ref = weights.resolve(wanted.model)
    spec = weights.spec_of(ref)
    wanted = resolved(wanted, spec)
    _check(wanted, spec)
    if ref.kind == "local":
        weights.check_complete(Path(ref.location))
    if wanted.evaluation.dataset and sources.kind_of(wanted.evaluation.dataset) == "path":
        rows.read(Path(wanted.evaluation.dataset).expanduser())
    job = job_of(wanted, spec, steps=_known_steps(wanted))
    target = _target(wanted, backend)
    known, problems = calibration.load() if not params.get("no_calibration") else (None, ())
    for line in problems:
        sys.stderr.write(line + "\n")
    try:
        made = plan(job, target, calibration=known)
    except CannotFit as error:
        command = f"python flows/finetune_flow.py run --model {wanted.model}"
        raise UserError(render_cannot_fit(error, command)) from None
    _check(_as_planned(wanted, made), spec, otherwise="Ask for fewer GPUs: --gpus 1.")
    if params.get("plan_only"):
        sys.stdout.write(render(made) + "\n")
        raise SystemExit(0)
    sys.stderr.write(render(made) + "\n\n")  # not to standard output: deployments print JSON there
    if backend == "local":
        _check_installed(wanted.launcher)
        _check_disk(made)
    else:
        staging.stage(wanted)
    return made


def _as_planned(wanted: Settings, made: Plan) -> Settings:
    """The settings with the plan's nodes and GPUs: some things an engine can't do depend on them."""
    planned = {"nodes": made.layout.nodes, "gpus": made.layout.processes_per_node}
    return wanted.model_copy(update={"resources": wanted.resources.model_copy(update=planned)})


def _check_installed(launcher: str) -> None:
    missing = [name for name in PACKAGES[launcher] if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: this machine can "
            f"plan, but not train with {launcher}.",
            "pip install -e '.[train]'",
        )


def _check_disk(made: Plan) -> None:
    """Refuse a run on this machine whose checkpoints and model will not fit on its disk."""
    root = workdir.root()
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    needed = made.request.disk_mib * MIB
    if free < needed:
        raise UserError(
            f"{root} has {free / GIB:.1f} GiB free; the run's weights, checkpoints and model need about "
            f"{needed / GIB:.1f} GiB there.",
            "Free some space, or name another place: export FINETUNE_WORK_DIR=/a/larger/disk",
        )


def one_line(made: Plan) -> str:
    """The plan in a line, for the log of a task."""
    layout, memory = made.layout, made.prediction.memory
    what = f"{made.request.gpus_per_node}x {made.request.gpu}" if made.request.gpu else "CPU"
    return (
        f"plan: {made.model}, {made.method} with {made.engine}, {layout.nodes} node(s) of {what}, "
        f"{layout.sharding}, micro batch {layout.micro_batch} x {layout.accumulation}, "
        f"{memory.likely_bytes / GIB:.2f} GiB (up to {memory.upper_bytes / GIB:.2f}) a process"
    )


def agreed(made: Plan | None, wanted: Settings) -> Plan:
    """The plan this run was launched with; UserError where a deployed flow was started for another job."""
    if made is None:
        raise UserError("This run has no plan.", "Start it with `run`, or deploy the flow anew.")
    planned = (made.model, made.method, made.engine)
    asked = (wanted.model, wanted.method, wanted.launcher)
    if planned[1:] != asked[1:] or made.layout.global_batch != wanted.batch_size:
        raise UserError(
            f"This deployment was planned for {planned}, batch {made.layout.global_batch}; "
            f"the run asks for {asked}, batch {wanted.batch_size}.",
            "Deploy the flow anew with these values: a deployment's resources are fixed.",
        )
    return made


def flags_of(flow: Any) -> dict[str, Any]:
    """A running flow's parameters, as :func:`settings_from` takes them."""
    return {flag: getattr(flow, flag) for flag in FLAGS} | {"overrides": flow.overrides}


def _check(
    wanted: Settings,
    spec: ModelSpec,
    otherwise: str = "See the table of what runs where in docs/methods.md.",
) -> None:
    trackers.check_installed(wanted.tracker)
    reason = engines.get(wanted.launcher).unsupported(wanted, spec)
    if reason is not None:
        other = next(name for name in engines.ENGINES if name != wanted.launcher)
        can = engines.get(other).unsupported(wanted, spec) is None
        raise UserError(
            f"--model {wanted.model} --method {wanted.method} --launcher {wanted.launcher}: {reason}.",
            f"Use --launcher {other}." if can else otherwise,
        )
    seq_len = wanted.seq_len or DEFAULT_SEQ_LEN
    if seq_len > spec.max_seq_len:
        raise UserError(
            f"--seq-len {seq_len}: {spec.name} takes at most {spec.max_seq_len} tokens.",
            f"Use --seq-len {spec.max_seq_len} or less.",
        )


def _known_steps(wanted: Settings) -> int | None:
    """Optimizer steps, where the data is at hand already; reading it also refuses broken data."""
    if sources.kind_of(wanted.dataset) != "path":
        return wanted.max_steps
    train, _ = prepare.split(rows.read(sources.fetch(wanted.dataset, Path())), wanted)
    steps = max(1, len(train) * wanted.epochs // wanted.batch_size)
    return min(steps, wanted.max_steps or steps)


def job_of(wanted: Settings, spec: ModelSpec, steps: int | None) -> Job:
    checkpointing = wanted.activation_checkpointing
    stage = wanted.zero.stage
    return Job(
        model=spec,
        method=wanted.method,
        engine=wanted.launcher,
        seq_len=wanted.seq_len or DEFAULT_SEQ_LEN,
        global_batch=wanted.batch_size,
        micro_batch=wanted.micro_batch,
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


def _target(wanted: Settings, backend: Backend) -> Target:
    machine: Machine | None = local_machine.here() if backend == "local" else None
    asked = wanted.resources
    return Target(
        kind=backend,
        machine=machine,
        nodes=asked.nodes,
        gpus=asked.gpus,
        gpu=asked.gpu,
        instance_type=asked.instance_type,
        cloud=asked.cloud,
        device=asked.device,
    )
