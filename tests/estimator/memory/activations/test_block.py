"""What one block keeps for its backward pass: formula against the code of transformers, PEFT and torchtune.

Counted on a CPU: every tensor that autograd saves, each storage once, of a model with two blocks less those
of one with one.
"""

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest

from estimator.memory.activations.block import block_bytes
from estimator.models import hf_config
from estimator.models.spec import ModelSpec
from estimator.setup import LlamaAdapter, Setup
from tests.optional import require_torchtune

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 64
SHAPE = {
    "vocab_size": 100,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Gemma": {"head_dim": 32},
    "Gemma2": {"head_dim": 32},
    "Phi": {},
    "Phi3": {"pad_token_id": 0},
    "GPTNeoX": {"num_key_value_heads": None},
    "StableLm": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


def kept_bytes(run: Callable[[], Any], parameters: Any) -> int:
    """Bytes of what autograd saves in ``run``, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    saved: dict[int, tuple[int, Any]] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = (
                storage.nbytes(),
                tensor,
            )  # holds it, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    del result
    return sum(size for size, _ in saved.values())


def model_of(family: str) -> tuple[Any, ModelSpec]:
    values = {key: value for key, value in (SHAPE | FAMILIES[family]).items() if value is not None}
    config = getattr(transformers, f"{family}Config")(**values)
    config._attn_implementation = "sdpa"
    if family == "Gemma2":  # SDPA has no soft cap: the rest of the block is compared
        config.attn_logit_softcapping = None
    with mock.patch.object(transformers.Gemma2PreTrainedModel, "_supports_sdpa", True):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    return model, hf_config.to_spec({"model_type": config.model_type} | config.to_dict(), family)


def per_block(model: Any, base: Any) -> float:
    """Bytes a token of one block: two blocks' less one's."""
    inner = base.gpt_neox if hasattr(base, "gpt_neox") else base.model
    blocks, embedding = list(inner.layers), base.get_input_embeddings()
    tokens = torch.randint(0, 100, (BATCH, LENGTH))
    counts = []
    for number in (1, 2):
        inner.layers = torch.nn.ModuleList(blocks[:number])
        inner.config.num_hidden_layers = number
        inputs = embedding(tokens).detach().requires_grad_()
        counts.append(kept_bytes(partial(model, inputs_embeds=inputs, use_cache=False), model.parameters()))
    return (counts[1] - counts[0]) / (BATCH * LENGTH)


def step(spec: ModelSpec, **changes: Any) -> Setup:
    values: dict[str, Any] = {"engine": "transformers", "micro_batch_size": BATCH, "seq_len": LENGTH}
    return Setup(model=spec, **(values | changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_transformers_block_saves_the_bytes_of_the_formula(family: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, spec = model_of(family)
        counted = per_block(model, model)
    assert block_bytes(step(spec)) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Phi"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ()], ids=["q and v", "all"])
def test_a_block_with_peft_adapters_saves_the_bytes_of_the_formula(
    family: str, targets: tuple[str, ...]
) -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base, spec = model_of(family)
        names = list(targets) or "all-linear"
        config = peft.LoraConfig(r=16, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config)
        counted = per_block(model, model.get_base_model())
    lora = step(spec, method="lora", lora_rank=16, lora_targets=targets or spec.projections)
    assert block_bytes(lora) == pytest.approx(counted, rel=0.01)


def test_a_block_with_peft_prompts_saves_the_bytes_of_the_formula() -> None:
    """PEFT repeats the prompt's keys and values for each sequence, which shows in such short ones."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base, spec = model_of("Llama")
        config = peft.AdaptionPromptConfig(adapter_len=10, adapter_layers=2, task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config)
        counted = per_block(model, model.get_base_model())
    formula = block_bytes(step(spec, method="adapter-v1", llama_adapter=LlamaAdapter(start_layer=0)))
    assert formula == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@pytest.mark.parametrize("start_layer", [0, 2])
def test_a_block_with_llama_adapter_v2_saves_the_bytes_of_the_formula(family: str, start_layer: int) -> None:
    """The mean over two blocks: prompts in none of them are the formula's for many blocks below the first."""
    adapter_v2 = pytest.importorskip("launchers.engines.loop.adapter_v2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, spec = model_of(family)
        adapter_v2.insert(model, adapter_v2.AdapterV2(prompt_length=10, start_layer=start_layer))
        counted = per_block(model.train(), model)
    many = dataclasses.replace(spec, layers=10_000 if start_layer else 2)
    first = many.layers - 1 if start_layer else 0
    formula = block_bytes(
        step(many, engine="fsdp2", method="adapter-v2", llama_adapter=LlamaAdapter(start_layer=first))
    )
    assert formula == pytest.approx(counted, rel=0.01)


TUNED = {
    "vocab_size": 100,
    "num_layers": 1,
    "num_heads": 8,
    "num_kv_heads": 4,
    "embed_dim": 256,
    "max_seq_len": LENGTH,
    "intermediate_dim": 896,
}


@pytest.mark.parametrize("lora", [False, True])
def test_a_torchtune_block_saves_the_bytes_of_the_formula(lora: bool) -> None:
    require_torchtune()
    from torchtune.models import llama3_1 as llama
    from torchtune.modules import peft

    torch.set_default_dtype(torch.bfloat16)
    try:
        if lora:
            model = llama.lora_llama3_1(["q_proj", "v_proj"], lora_rank=16, lora_alpha=16, **TUNED)
            peft.set_trainable_params(model, peft.get_adapter_params(model))
        else:
            model = llama.llama3_1(**TUNED)
        inputs = torch.randn(BATCH, LENGTH, 256, requires_grad=True)
        counted = kept_bytes(lambda: model.layers[0](inputs), model.parameters()) / (BATCH * LENGTH)
    finally:
        torch.set_default_dtype(torch.float32)
    spec = ModelSpec(
        name="small",
        family="llama",
        layers=1,
        hidden=256,
        heads=8,
        kv_heads=4,
        head_dim=32,
        ffn=896,
        vocab=100,
        tied_embeddings=False,
        max_seq_len=LENGTH,
    )
    changes: dict[str, Any] = {"method": "lora", "lora_targets": ("q_proj", "v_proj")} if lora else {}
    formula = block_bytes(step(spec, engine="torchtune", lora_rank=16, **changes))
    assert formula == pytest.approx(counted, rel=0.01)
