"""Checks before a GPU is requested: conflicting options, missing packages, small disks.

Each function raises a two-line UserError.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterable
from pathlib import Path

from estimator import models
from estimator.errors import UserError
from estimator.formatting import format_bytes
from estimator.models import ModelSpec
from estimator.plan import MIB, Plan
from estimator.vocabulary import ENGINES, LAUNCHED_ENGINES, METHODS, TASKS
from launchers import engines
from launchers.report import trackers
from launchers.run.job import first_supported_engine, unsupported
from launchers.scoring.check import check_function
from launchers.scoring.functions import scorer_of
from launchers.scoring.reward_model import check_reward_model
from launchers.settings import Settings, check_used


def check_supported(
    settings: Settings,
    spec: ModelSpec,
    *,
    otherwise: str = "See the table of what runs where in docs/methods.md.",
) -> None:
    """Raise UserError for anything the engine does not support.

    ``otherwise``: advice in the message if no engine supports the settings.
    """
    trackers.check_installed(settings.tracker)
    if isinstance(spec, ModelSpec) and spec.own_code and not settings.trust_remote_code:
        raise UserError(
            f"--model {settings.model}: transformers has no class for {spec.family} models; their code is in "
            "the model's folder.",
            "Read that code; with --trust-remote-code it runs in the tasks of the run, and nowhere else.",
        )
    check_used(settings)
    _check_adapter_only(settings)
    engine = first_supported_engine(settings, spec) if settings.engine == "auto" else settings.engine
    reason = unsupported(engine, settings, spec)
    if reason is not None:
        reasons = {name: unsupported(name, settings, spec) for name in LAUNCHED_ENGINES}
        supported = next((name for name, other_reason in reasons.items() if other_reason is None), None)
        problem = f"--model {settings.model} --method {settings.method} --engine {engine}: {reason}."
        if supported is not None:
            raise UserError(problem, f"Use --engine {supported}.")
        other_engine, other_reason = next(
            (name, other_reason) for name, other_reason in reasons.items() if name != engine
        )
        detail = (
            f"{other_engine} does not support it either: {other_reason}. " if other_reason != reason else ""
        )
        raise UserError(problem, f"{detail}{otherwise}")


def _check_adapter_only(settings: Settings) -> None:
    """Raise UserError if adapter_only is set but the method exports no separate adapter."""
    if not settings.export.adapter_only:
        return
    if settings.method != "auto" and not METHODS[settings.method].adapters:
        raise UserError(
            "--adapter-only: --method full trains no adapter.",
            "Use --method lora, or remove it.",
        )
    if settings.method == "qlora" and settings.lora.quantization == "int8":
        raise UserError(
            "--adapter-only: no other library can load an adapter onto the 8-bit base that it is trained on.",
            "Use --quantization nf4-double, or remove it.",
        )


def check_reward(settings: Settings, seq_len: int) -> None:
    """Raise UserError if task grpo has no reward, or one that does not return a finite number."""
    if not TASKS[settings.task].draws_answers:
        return
    reward = settings.rl.reward
    if reward is None:
        raise UserError(
            "Task grpo has no reward for its answers.",
            (
                "Set a Python function (--rl-reward path.py:function, called with prompt and answer), or a "
                "reward model (--rl-reward FOLDER, as exported by task reward)."
            ),
        )
    if settings.rl.answer_tokens(seq_len) >= seq_len:
        raise UserError(
            (
                f"--rl-max-completion-length {settings.rl.max_completion_length} leaves no tokens of seq_len "
                f"{seq_len} for the prompt."
            ),
            f"Use --rl-max-completion-length {max(1, seq_len // 2)}, or a longer seq_len.",
        )
    if scorer_of(reward).function is not None:
        check_function(reward)
        return
    source = models.locate(reward)
    if source.kind == "folder":
        check_reward_model(Path(source.location), "rl.reward", reward)


def check_layout(settings: Settings, plan: Plan, spec: ModelSpec) -> None:
    """Check engine support again with the plan's nodes and GPUs, because some limits depend on them."""
    numbers = {"nodes": plan.layout.nodes, "gpus": plan.layout.processes_per_node}
    resources = settings.resources.model_copy(update=numbers)
    fewer = "Use fewer GPUs: --gpus 1."
    check_supported(settings.model_copy(update={"resources": resources}), spec, otherwise=fewer)
    last = plan.layout.world_size - 1
    if settings.profile.window is not None and max(settings.profile.ranks) > last:
        raise UserError(
            f"profile.ranks: rank {max(settings.profile.ranks)} does not exist, the last is {last}.",
            "Choose ranks of the plan, such as profile.ranks=0.",
        )


def check_installed(engine: str, method: str = "full", *, liger: bool = False) -> None:
    """Raise UserError if packages required by an engine, or by a method on that engine, are not installed.

    ``liger``: also require Liger-Kernel.
    """
    if liger and importlib.util.find_spec("liger_kernel") is None:
        raise UserError(
            "--liger: the package liger-kernel is not installed.",
            "pip install liger-kernel",
        )
    packages = engines.needs(engine).packages
    if METHODS[method].quantized and ENGINES[engine].runs_loop:
        packages = (*packages, "bitsandbytes")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed: this machine can "
            f"plan, but not train with {engine}.",
            f"pip install 'metaflow-finetune[{'rl' if engine == 'trl' else 'train'}]'",
        )


def check_disks(
    plan: Plan, free_bytes: Iterable[tuple[str, int]], variable: str = "FINETUNE_WORK_DIR"
) -> None:
    """Raise UserError if a disk is too small for weights, checkpoints and model.

    ``free_bytes``: (name of the disk, free bytes) of each disk. ``variable``: the environment variable that
    moves these files to another disk.
    """
    required_bytes = plan.request.disk_mib * MIB
    for name, free in free_bytes:
        if free < required_bytes:
            raise UserError(
                f"{name} has {format_bytes(free)} free; the run's weights, checkpoints and model need about "
                f"{format_bytes(required_bytes)} there.",
                f"Free some space, or use another disk: export {variable}=/a/larger/disk",
            )


def check_output(settings: Settings) -> None:
    """Raise UserError if the output folder on this machine is not writable."""
    folder = Path(settings.output_dir).expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and _is_writable(existing)):
        reason = "is not writable" if existing.is_dir() else "is a file"
        raise UserError(
            f"--output-dir {settings.output_dir}: {existing} {reason}.",
            "Choose another folder: --output-dir FOLDER",
        )


def _is_writable(folder: Path) -> bool:
    """Return whether a file can be created, which access rights do not decide for root (/proc)."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_window(settings: Settings, total_steps: int) -> None:
    """Raise UserError if the profiled window exceeds the run's steps."""
    window = settings.profile.window
    if window is not None and window[1] > total_steps:
        raise UserError(
            f"profile.steps {settings.profile.steps}: the run has only {total_steps:,} steps.",
            f"Choose steps within the run, such as profile.steps={max(1, total_steps - 3)}:{total_steps}.",
        )


def check_evaluations(settings: Settings, total_steps: int) -> None:
    """Raise UserError if the run ends before its first evaluation."""
    interval = settings.evaluation.every_steps
    if interval is not None and interval > total_steps:
        raise UserError(
            f"--eval-every {interval}: the run has only {total_steps:,} steps.",
            f"Use --eval-every {max(1, total_steps // 5)}, for example.",
        )
