"""Questions to the planner's page: all sizes of models, each field, with and without plans."""

from __future__ import annotations

from itertools import cycle

MODELS = ("llama-8b", "llama-70b", "qwen2.5-7b", "tiny-llama", "mixtral-8x7b", "gemma-2-9b", "llama-405b")
CHOICES: tuple[dict[str, str], ...] = (
    {},
    {"method": "lora"},
    {"method": "qlora", "gpu": "RTX 4090", "nodes": "1"},
    {"method": "full", "gpu": "H100 SXM"},
    {"task": "dpo", "method": "lora"},
    {"task": "pretrain", "packing": "on", "seq_len": "4096"},
    {"task": "reward", "lora_rank": "64", "method": "lora"},
    {"seq_len": "8192", "micro_batch_size": "1"},
    {"global_batch_size": "64", "tokens": "1B", "deadline_hours": "24"},
    {"method": "lora", "tokens": "250M", "budget_usd": "300"},
    {"cloud": "gcp", "spot": "on"},
    {"cloud": "aws, azure", "capacity": "any"},
    {"instance_type": "p5.48xlarge, p4d.24xlarge", "method": "lora"},
    {"gpu": "L4", "nodes": "1", "gpus": "1"},
    {"max_gpus": "8", "prefer": "speed"},
    {"engine": "deepspeed", "zero_offload": "cpu"},
    {"engine": "fsdp2", "precision": "bf16-mixed"},
    {"optimizer": "adamw8bit", "activation_checkpointing": "on"},
    {"activation_checkpointing": "off", "method": "lora"},
    {"engine": "megatron", "global_batch_size": "128"},
    {"tokens": "100M", "prefer": "speed", "method": "qlora"},
)
IMAGES: tuple[dict[str, str], ...] = (
    {"model": "sdxl"},
    {"model": "sdxl", "method": "lora", "resolution": "512"},
    {"model": "tiny-sdxl", "method": "full"},
)
FORMS = [*({"model": model, **more} for model, more in zip(cycle(MODELS), CHOICES, strict=False)), *IMAGES]
