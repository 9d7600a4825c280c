"""The model, its adapters, its optimizer and its schedule, as DeepSpeed gets them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from estimator.errors import UserError
from launchers.engines.deepspeed.config import zero_stage
from launchers.gang.job import TrainJob
from launchers.imports import collector_paused
from launchers.settings import Lora, Settings


def load(job: TrainJob, config: dict[str, Any], device: torch.device) -> Any:
    """The job's model with its weights, in training mode; with ZeRO-3 each rank holds its shard only.

    The HfDeepSpeedConfig that makes transformers load sharded has to outlive the loading; it is kept on
    the model.
    """
    layout, options = job.plan.layout, dict[str, Any]()
    hf_config = None
    if zero_stage(job) == 3:
        from transformers.integrations import HfDeepSpeedConfig

        hf_config = HfDeepSpeedConfig(config)
    elif device.type == "cuda":
        options["device_map"] = {"": device}
    with collector_paused():
        from transformers import AutoModelForCausalLM

        with _weights_read_by_first_rank() if zero_stage(job) == 3 else contextlib.nullcontext():
            model = AutoModelForCausalLM.from_pretrained(  # imports the model's own code
                job.model_dir,
                dtype=torch.float32 if layout.precision == "fp32" else torch.bfloat16,
                **options,
            )
    model.hf_deepspeed_config = hf_config
    if zero_stage(job) == 3:
        _fetch_expert_blocks_whole(model)
    if layout.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if job.plan.method != "full":
        model = _with_adapters(model, job.settings)
    model.train()
    return model


@contextlib.contextmanager
def _weights_read_by_first_rank() -> Iterator[None]:
    """With ZeRO-3, let every rank but the first load names and shapes alone: the first hands out the weights.

    transformers (5.4, integrations/deepspeed.py) loads all files in each rank, of which only the first rank's
    are used. Mapped files cost little, but experts are put together: a copy of the model in every rank.
    """
    from transformers import modeling_utils

    read = modeling_utils.load_state_dict

    def read_shapes(file: Any, *_: Any, **options: Any) -> Any:
        return read(file, **(options | {"map_location": "meta"}))

    if dist.get_rank() != 0:
        modeling_utils.load_state_dict = read_shapes
    try:
        yield
    finally:
        modeling_utils.load_state_dict = read


def _with_adapters(model: Any, settings: Settings) -> Any:
    from peft import LoraConfig, get_peft_model

    lora: Lora = settings.lora
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    targets = [name for name in lora.targets if name in linear]
    if not targets:
        raise UserError(
            f"lora.targets = {', '.join(lora.targets)}: {settings.model} has no such linear layers.",
            f"Its linear layers are {', '.join(sorted(linear))}.",
        )
    torch.manual_seed(settings.seed)
    return get_peft_model(
        model,
        LoraConfig(
            r=lora.rank,
            lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=targets,
            task_type="CAUSAL_LM",
        ),
        autocast_adapter_dtype=False,  # DeepSpeed wants one type; the optimizer keeps them in fp32
    )


def _fetch_expert_blocks_whole(model: Any) -> None:
    """ZeRO-3 gathers weights module by module as they are used. Which expert is used differs between
    ranks, so that a block of experts is gathered as one (DeepSpeed's "leaf modules")."""
    from deepspeed.utils import set_z3_leaf_modules

    blocks = {type(module) for module in model.modules() if hasattr(module, "experts")}
    if blocks:
        set_z3_leaf_modules(model, list(blocks))


def optimizer(job: TrainJob, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own, so that nothing has to be compiled; its fused AdamW is native on GPUs and on CPUs."""
    settings = job.settings.optimizer
    lr = peak_lr(job.settings)
    if settings.name == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def peak_lr(settings: Settings) -> float:
    if settings.optimizer.lr == "auto":
        raise ValueError("optimizer.lr is still auto: it has to be resolved before the job is written.")
    return settings.optimizer.lr


def lr_factor(settings: Settings, total_steps: int) -> Callable[[int], float]:
    """Share of the peak learning rate that a step (0 is the first) uses.

    The same as torchtune's get_cosine_schedule_with_warmup (and thereby as transformers'): linear from
    0 over the warm-up, then the chosen shape, which reaches 0 one step after the last.
    """
    warmup, name = settings.schedule.warmup_steps, settings.schedule.name

    def factor(step: int) -> float:
        if step < warmup:
            return step / max(1, warmup)
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        if name == "cosine":
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        return 1.0 - progress if name == "linear" else 1.0

    return factor


def schedule(job: TrainJob) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """What DeepSpeed calls with the optimizer to get the schedule, and then steps itself."""
    factor = lr_factor(job.settings, job.total_steps)
    return lambda wrapped: LambdaLR(wrapped, factor)
