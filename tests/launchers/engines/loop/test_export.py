"""Exports of the training loop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)

from estimator.errors import UserError
from launchers import settings
from launchers.engines import _merge
from launchers.engines.loop import export, model
from tests.launchers.engines.loop import families, runs

CASES = [
    ("llama", {}),
    ("llama", {"use_rslora": True}),
    ("llama", {"use_dora": True}),
    ("phi3", {"use_dora": True, "use_rslora": True}),
    ("falcon", {"use_dora": True, "use_rslora": True}),
]


@pytest.mark.parametrize(("family", "flags"), CASES)
def test_a_merged_model_has_the_outputs_of_the_base_with_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, flags: dict[str, bool]
) -> None:
    """Merged by blocks of few rows, in fp32, and compared with PEFT's own merge weight by weight."""
    monkeypatch.setattr(_merge, "BLOCK", 64)
    base = tmp_path / "base"
    _network(family).save_pretrained(base, max_shard_size="40KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    adapted = _adapted(AutoModelForCausalLM.from_pretrained(base), flags)
    adapted.save_pretrained(tmp_path / "adapter")
    export.merge(base, tmp_path / "adapter", tmp_path / "merged")
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copyfile(base / name, tmp_path / "merged" / name)

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(3, 33)[None]
    with torch.no_grad():
        logits = adapted(tokens).logits
        assert torch.allclose(merged(tokens).logits, logits, rtol=0, atol=1e-5)
        plain = AutoModelForCausalLM.from_pretrained(base).eval()(tokens).logits
        assert (plain - logits).abs().max() > 1e-2, "the adapter does something"
    reference = adapted.merge_and_unload().state_dict()
    for name, weight in merged.state_dict().items():
        assert torch.allclose(weight, reference[name], rtol=0, atol=1e-6), name


def _network(family: str) -> Any:
    shape: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    }
    kinds = {
        "llama": (LlamaForCausalLM, LlamaConfig(**shape, num_key_value_heads=2)),
        "phi3": (Phi3ForCausalLM, Phi3Config(**shape, num_key_value_heads=2)),
        "falcon": (FalconForCausalLM, FalconConfig(**shape, tie_word_embeddings=False)),
    }
    torch.manual_seed(0)
    kind, config = kinds[family]
    return kind(config)


def _adapted(base: Any, flags: dict[str, bool]) -> Any:
    """Return the base with adapters that look trained: no matrix is zero, magnitudes differ from the base."""
    targets = model.adapted_layers(base, settings.build({"lora": {"targets": "all-linear"}}))
    config = LoraConfig(r=4, lora_alpha=12, target_modules=targets, task_type="CAUSAL_LM", **flags)
    adapted = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
            elif "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    return adapted


def test_an_adapter_with_tensors_other_than_lora_matrices_is_refused(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(2, 4),
        "base_model.model.layers.0.q_proj.lora_B.weight": torch.ones(4, 2),
        "base_model.model.embed_tokens.lora_embedding_A": torch.ones(2, 4),
    }
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    with pytest.raises(RuntimeError, match="lora_embedding_A"):
        export._updates(tmp_path)


def test_model_files_with_other_names_of_the_adapted_layers_are_refused_before_training(
    tmp_path: Path,
) -> None:
    network = _network("llama")
    network.save_pretrained(tmp_path)
    job = runs.make_job(tmp_path, tmp_path, tmp_path, steps=1, settings={"method": "lora"})
    adapted = _adapted(AutoModelForCausalLM.from_pretrained(tmp_path), {})
    export.check_mergeable(adapted, job)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"no model\.layers\.0\.self_attn\.q_proj\.weight"):
        export.check_mergeable(adapted, job)


def test_an_adapter_is_merged_into_files_whose_tensor_names_transformers_converts(tmp_path: Path) -> None:
    """Nemotron-H: "backbone." in its files, "model." in transformers."""
    families.network("nemotron_h").save_pretrained(tmp_path / "base")
    job = runs.make_job(tmp_path, tmp_path / "base", tmp_path, steps=1, settings={"method": "lora"})
    adapted = _adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), {})
    held = export.tensor_names(job)
    assert all(name.startswith(("backbone.", "lm_head.")) for name in held)
    export.check_mergeable(adapted, job)
    adapted.save_pretrained(tmp_path / "adapter")
    export.merge(
        tmp_path / "base",
        tmp_path / "adapter",
        tmp_path / "merged",
        names_in_files=lambda names: export._names_in_files(adapted, names, held),
    )
    (tmp_path / "merged" / "config.json").write_text((tmp_path / "base" / "config.json").read_text())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokens = torch.arange(3, 33)[None]
    with torch.no_grad():
        difference = (merged(tokens).logits - adapted.eval()(tokens).logits).abs().max()
    assert difference < families.SAME
