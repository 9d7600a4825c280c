"""LLaMA-Adapter v2 modules compared with v1 of PEFT and with litgpt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from estimator.models import find
from estimator.setup import Setup
from launchers.engines.loop import adapter_v2
from launchers.engines.loop.adapter_v2 import AdapterV2
from tests.estimator.models.hf_configs import config_of
from tests.estimator.models.test_parameters import built

TOKENS = torch.arange(3, 33)[None].repeat(2, 1)
PACKED = torch.cat([torch.arange(12), torch.arange(18)])[None].repeat(2, 1)


def network(kind: str = "Llama", **values: Any) -> Any:
    """Return a model of four small blocks with random weights."""
    import transformers

    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**shape | values)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def trained(model: Any) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def moved(model: Any) -> Any:
    """Return the model with all trained parameters changed from their initial values."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_new_adapter_changes_no_output_and_is_loaded_back_from_its_folder(
    tmp_path: Path, kind: str
) -> None:
    model = network(kind)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        before = [model(TOKENS).logits, model(TOKENS, position_ids=PACKED).logits]
        adapter_v2.insert(model, AdapterV2(prompt_length=10, start_layer=2))
        assert torch.equal(model(TOKENS).logits, before[0])
        assert torch.equal(model(TOKENS, position_ids=PACKED).logits, before[1])
        after = moved(model)(TOKENS).logits
    assert (after - before[0]).abs().max() > 0.1
    state = {name: parameter.detach() for name, parameter in trained(model).items()}
    adapter_v2.save(state, AdapterV2(prompt_length=10, start_layer=2), tmp_path / "adapter")
    loaded = adapter_v2.load(tmp_path / "base", tmp_path / "adapter")
    assert not trained(loaded)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, after)


def test_answers_are_the_same_with_and_without_a_kv_cache() -> None:
    model = network()
    adapter_v2.insert(model, AdapterV2(prompt_length=10, start_layer=1))
    moved(model)
    tokens = TOKENS[:1]
    cached = model.generate(tokens, max_new_tokens=8, do_sample=False)
    for _ in range(8):
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(cached, tokens)


def test_attention_over_adaption_prompts_equals_that_of_pefts_adapter_v1() -> None:
    from peft import AdaptionPromptConfig, get_peft_model

    ours, base = network(), network()
    config = AdaptionPromptConfig(adapter_len=10, adapter_layers=2, task_type="CAUSAL_LM")
    theirs = get_peft_model(base, config).eval()
    adapter_v2.insert(ours, AdapterV2(prompt_length=10, start_layer=2))
    with torch.no_grad():
        plain = ours(TOKENS).logits
        for block, other in zip(ours.model.layers[2:], base.model.layers[2:], strict=True):
            block.self_attn.adapter_prompt.copy_(other.self_attn.adaption_prompt[0])
            block.self_attn.adapter_gate.fill_(0.5)
            other.self_attn.adaption_gate.fill_(0.5)
        assert torch.allclose(ours(TOKENS).logits, theirs(TOKENS).logits, rtol=0, atol=1e-5)
        assert (plain - ours(TOKENS).logits).abs().max() > 1e-2


def test_outputs_are_scaled_after_the_bias_is_added() -> None:
    model = network()
    adapter_v2.insert(model, AdapterV2(prompt_length=10, start_layer=0))
    linear = model.model.layers[0].mlp.down_proj
    inputs = torch.randn(3, 96)
    with torch.no_grad():
        plain = inputs @ linear.weight.T
        linear.adapter_scale.fill_(3.0)
        linear.adapter_bias.fill_(0.5)
        assert torch.allclose(linear(inputs), 3 * (plain + 0.5), atol=1e-6)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model = network()
    adapter_v2.insert(model, AdapterV2(prompt_length=10, start_layer=0))
    state = {name: parameter.detach() for name, parameter in trained(model).items()}
    adapter_v2.save(state, AdapterV2(prompt_length=10, start_layer=0), tmp_path / "adapter")
    network(num_hidden_layers=3).save_pretrained(tmp_path / "base")
    with pytest.raises(RuntimeError, match=r"layers\.3"):
        adapter_v2.load(tmp_path / "base", tmp_path / "adapter")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("llama-2-7b", 1_229_760, 4_279_744), ("llama-8b", 1_229_760, 4_505_024)],
)
def test_the_numbers_of_trained_parameters_equal_those_of_litgpt(name: str, first: int, second: int) -> None:
    """litgpt's tutorials/resource-tables.md prints both figures for Llama 2 7B. PEFT's v1 has one gate a
    block where litgpt has one a head: 31 fewer in each of the 30 blocks."""
    from peft import AdaptionPromptConfig, get_peft_model

    spec = find(name)

    def counted(method: str, engine: str) -> int:
        return Setup(model=spec, engine=engine, method=method).trainable_parameters  # type: ignore[arg-type]

    assert counted("adapter-v1", "litgpt") == first
    assert counted("adapter-v2", "litgpt") == counted("adapter-v2", "fsdp2") == second
    with torch.device("meta"):
        model = built(config_of(spec))
        adapter_v2.insert(model, AdapterV2(prompt_length=10, start_layer=2))
    assert sum(parameter.numel() for parameter in trained(model).values()) == second

    config = AdaptionPromptConfig(adapter_len=10, adapter_layers=spec.layers - 2, task_type="CAUSAL_LM")
    with torch.device("meta"):
        theirs = get_peft_model(built(config_of(spec)), config)
    trained_parameters = sum(parameter.numel() for parameter in trained(theirs).values())
    assert trained_parameters == counted("adapter-v1", "deepspeed") == first - 30 * 31
