"""Tiny models with random weights: a full model, and a LoRA adapter for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.models import tiny_llama


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**tiny_llama.CONFIG, "num_hidden_layers": 1}
    return tiny_llama.make(tmp_path_factory.mktemp("models") / "tiny", config=config)


@pytest.fixture(scope="session")
def adapter_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter with random weights that changes answers, with its tokenizer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("runs") / "adapter"
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    get_peft_model(base, config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 7}')
    return folder
