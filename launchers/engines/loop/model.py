"""A job's transformers model: loading, adapters, and selection of the trained parameters."""

from __future__ import annotations

from typing import Any

import torch

from estimator.engines.liger import in_blocks
from estimator.errors import UserError
from estimator.models import (
    COMPRESSED_PROJECTIONS,
    LATENT_PROJECTIONS,
    PROJECTIONS,
    RECURRENT_PROJECTIONS,
    architectures,
)
from estimator.models.architectures import names_in_transformers
from estimator.vocabulary import METHODS, TASKS, product_type
from launchers.base.imports import collector_paused, import_peft, import_transformers
from launchers.engines.loop import compressors, head, liger, quantized, unet, varlen, vision, whole_modules
from launchers.engines.loop.families import blocks, expert_tensors, indexers
from launchers.engines.loop.recompute import recompute
from launchers.engines.reward_head import HEAD
from launchers.gang.job import TrainJob
from launchers.models import causal
from launchers.settings import Settings

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(job: TrainJob) -> torch.dtype:
    """Return the data type of the model's matrix products."""
    return _DTYPES[product_type(job.plan.layout.precision)]


def pretrained(job: TrainJob, *, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """Load the job's model with its weights; ``options`` are passed to from_pretrained.

    If the method quantizes the base, each matrix is quantized on ``device``, whatever device the model is
    loaded to.
    """
    if TASKS[job.settings.task].images:
        return unet.load(job, dtype)
    if kind := quantized.kind_of(job):
        import_transformers()
        with collector_paused():
            from launchers.engines.loop.quantized_loading import LoopQuantization

        options["quantization_config"] = LoopQuantization(kind, device)
    trusted = job.settings.trust_remote_code
    return causal.load(job.model_dir, trust_remote_code=trusted, dtype=dtype, **options)


def unloaded(job: TrainJob, *, dtype: torch.dtype) -> Any:
    """Build the job's model without loading weights, on torch's current device; buffers have their values."""
    if TASKS[job.settings.task].images:
        return unet.build(job, dtype)
    return causal.build(job.model_dir, trust_remote_code=job.settings.trust_remote_code, dtype=dtype)


def made_trainable(model: Any, job: TrainJob, *, adapters_in_fp32: bool = False) -> Any:
    """Put the model into training mode, with the job's adapters and activation checkpointing.

    Adapters have the base's type, or fp32.
    """
    if varlen.applies(job):
        varlen.use(model)
    compressors.fill_windows(model)
    if job.settings.liger:
        compiled, float8 = job.settings.compile is True, job.settings.fp8 != "none"
        hidden_act = getattr(model.config, "hidden_act", "")
        if in_blocks(model.config.model_type, hidden_act, compiled=compiled, float8=float8):
            liger.use_block_kernels(model)
        head.put_in(model, per_token=TASKS[job.settings.task].preferences)
    if job.plan.adapters:
        torch.manual_seed(job.settings.seed)
        model = _with_adapters(model, job)
        for parameter in model.parameters():
            if parameter.requires_grad:  # on the meta device, PEFT creates them in fp32
                parameter.data = parameter.data.to(torch.float32 if adapters_in_fp32 else dtype_of(job))
    elif job.settings.vision is not None:
        vision.freeze(model, job.settings)
    for indexer in indexers(model):
        indexer.requires_grad_(False)
    recompute(blocks(model), job)
    model.train()
    return model


def _with_adapters(model: Any, job: TrainJob) -> Any:
    if unet.is_unet(model):
        return unet.add_adapters(model, job)
    prompts = METHODS[job.plan.method].llama_adapter
    return _with_prompts(model, job) if prompts else _with_low_rank(model, job)


def _with_prompts(model: Any, job: TrainJob) -> Any:
    """Add a LLaMA-Adapter: v1 by PEFT, with one gate per block, or v2."""
    adapter = job.settings.adapter
    if job.plan.method == "adapter-v2":
        from launchers.engines.loop import adapter_v2

        adapter_v2.insert(model, adapter_v2.AdapterV2.of(adapter))
    else:
        import_peft()
        from peft import AdaptionPromptConfig, get_peft_model

        layers = model.config.num_hidden_layers - adapter.start_layer  # counted from the last
        config = AdaptionPromptConfig(
            adapter_len=adapter.prompt_length, adapter_layers=layers, task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, config)
    return model


def _with_low_rank(model: Any, job: TrainJob) -> Any:
    import_peft()
    from peft import get_peft_model

    # DeepSpeed requires one type for base and adapters; its optimizer keeps fp32 copies of the adapters
    adapted = get_peft_model(model, low_rank_config(model, job), autocast_adapter_dtype=False)
    whole_modules.tie(adapted)
    return adapted


def low_rank_config(model: Any, job: TrainJob) -> Any:
    """Build PEFT's configuration of the job's adapters for this model."""
    from peft import LoraConfig

    settings, lora = job.settings, job.settings.lora
    options = whole_modules.peft_options(model, settings.trained_modules)
    if rewards := causal.gives_rewards(model.config):
        options["modules_to_save"] = [*options.get("modules_to_save", ()), HEAD]
    if lora.experts:
        options["target_parameters"] = expert_tensors(model)
    layer_names = adapted_layers(model, settings)
    indexer_layers = {name for indexer in indexers(model) for name, _ in indexer.named_children()}
    if indexer_layers & set(layer_names):  # DeepSeek V4's have names of attention's layers
        options["exclude_modules"] = r".*\.indexer\..*"
    return LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=(
            layer_names if settings.vision is None else vision.adapted_layers(model, layer_names, settings)
        ),
        use_rslora=lora.rslora,
        use_dora=job.plan.method == "dora",
        task_type="SEQ_CLS" if rewards else "CAUSAL_LM",
        **options,
    )


def adapted_layers(model: Any, settings: Settings) -> list[str]:
    """Translate ``lora.targets`` to the layer names of this model's family, which may fuse matrices.

    The result never contains routers, heads and experts. PEFT's "all-linear" includes Llama 4's routers,
    which then fail: they are linear layers, but return more than a product. Names that PEFT would replace by
    the experts' tensors are excluded, too.
    """
    targets = settings.lora.targets
    linear = {name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    all_targets = (*PROJECTIONS, *LATENT_PROJECTIONS, *COMPRESSED_PROJECTIONS, *RECURRENT_PROJECTIONS)
    generic = all_targets if settings.lora.all_linear else targets
    model_type = model.config.get_text_config().model_type
    usable = linear - _names_of_experts(model_type)
    if architectures.family_of(model_type).recurrence == "mamba2":
        usable -= {"out_proj"}  # the fused kernel reads its weight directly and would ignore an adapter
    modules = [name for name in names_in_transformers(model_type, generic) if name in usable]
    if not modules:
        names = targets if isinstance(targets, str) else ", ".join(targets)
        raise UserError(
            f"lora.targets = {names}: {settings.model} has no such linear layers.",
            f"Its linear layers are {', '.join(sorted(usable))}.",
        )
    return modules


def _names_of_experts(model_type: str) -> set[str]:
    """Return the names that PEFT 0.21 maps to the tensors of all experts (modules in transformers 4)."""
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type)
    return set(conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, ()))
