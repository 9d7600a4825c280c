"""Small models of every kind that the traces are made of, and the steps of the grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from estimator.models import find
from estimator.setup import Setup

LLAMA = replace(
    find("tiny-llama"),
    name="small-llama",
    layers=3,
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    ffn=1536,
    vocab=8192,
)
WIDE = replace(
    LLAMA,
    name="wide-llama",
    layers=4,
    hidden=1024,
    heads=16,
    kv_heads=4,
    ffn=2816,
    vocab=32_000,
    tied_embeddings=True,
)
NARROW = replace(LLAMA, name="narrow-llama", hidden=256, heads=4, kv_heads=4, ffn=768, vocab=4096)
QWEN2 = replace(LLAMA, name="small-qwen2", family="qwen2", qkv_bias=True, tied_embeddings=True)
QWEN3 = replace(LLAMA, name="small-qwen3", family="qwen3", qk_norm="head")
MIXTRAL = replace(LLAMA, name="small-mixtral", family="mixtral", ffn=1024, experts=8, experts_per_token=2)
QWEN3_MOE = replace(
    QWEN3, name="small-qwen3-moe", family="qwen3_moe", ffn=256, experts=16, experts_per_token=4
)
GLM4 = replace(LLAMA, name="small-glm4", family="glm4", norms_per_layer=4, qkv_bias=True)
_RECURRENT: dict[str, Any] = {
    "layers": 4,
    "recurrent_heads": 8,
    "recurrent_head_dim": 64,
    "recurrent_groups": 4,
    "recurrent_state": 64,
    "conv_kernel": 4,
}
QWEN3_5 = replace(
    QWEN3,
    name="small-qwen3.5",
    family="qwen3_5_text",
    recurrence="gated-delta",
    gated_attention=True,
    recurrent_layers=3,
    **_RECURRENT,
)
NEMOTRON_H = replace(
    LLAMA,
    name="small-nemotron-h",
    family="nemotron_h",
    norms_per_layer=1,
    gated_mlp=False,
    hidden_act="relu2",
    one_part_blocks=True,
    recurrence="mamba2",
    recurrent_layers=2,
    mlp_layers=1,
    **_RECURRENT,
)
GEMMA4 = replace(
    LLAMA,
    name="small-gemma4",
    family="gemma4_text",
    layers=4,
    tied_embeddings=True,
    norms_per_layer=5,
    qk_norm="head",
    hidden_act="gelu_pytorch_tanh",
    router_scales=True,
    sliding_window=256,
    sliding_layers=2,
    global_head_dim=128,
    reused_kv_layers=2,
    reused_kv_sliding=1,
    reused_kv_ffn=3072,
    layer_embedding=64,
    layer_vocab=8192,
)
GEMMA4_MOE = replace(
    GEMMA4,
    name="small-gemma4-moe",
    norms_per_layer=7,
    global_kv_heads=2,
    global_keys_are_values=True,
    reused_kv_layers=0,
    reused_kv_sliding=0,
    reused_kv_ffn=0,
    layer_embedding=0,
    layer_vocab=0,
    ffn=256,
    experts=8,
    experts_per_token=2,
    shared_ffn=1024,
)
MISTRAL4 = replace(
    LLAMA,
    name="small-mistral4",
    family="mistral4",
    kv_heads=8,
    head_dim=96,
    ffn=256,
    experts=8,
    experts_per_token=2,
    shared_ffn=256,
    q_lora_rank=128,
    kv_lora_rank=64,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=96,
)
GLM_5 = replace(
    MISTRAL4,
    name="small-glm-5",
    family="glm_moe_dsa",
    dense_layers=1,
    dense_ffn=1024,
    index_layers=2,
    index_heads=4,
    index_head_dim=64,
)
DEEPSEEK_V4 = replace(
    LLAMA,
    name="small-deepseek-v4",
    family="deepseek_v4",
    kv_heads=1,
    ffn=256,
    experts=8,
    experts_per_token=2,
    shared_ffn=256,
    attention_sinks=True,
    q_lora_rank=128,
    index_layers=1,
    index_heads=4,
    index_head_dim=32,
    heavy_layers=1,
    sliding_layers=1,
    sliding_window=128,
    compress_rate=4,
    heavy_compress_rate=128,
    o_groups=4,
    o_lora_rank=64,
    residual_streams=4,
    sinkhorn_iterations=20,
)
LFM3 = replace(
    LLAMA,
    name="small-lfm3",
    family="lfm3",
    layers=4,
    norms_per_layer=4,
    qk_norm="head",
    tied_embeddings=True,
    head_gates=True,
    sliding_window=256,
    sliding_layers=1,
    recurrence="short-conv",
    recurrent_layers=2,
    conv_kernel=3,
)
LFM2 = replace(
    LLAMA,
    name="small-lfm2",
    family="lfm2",
    qk_norm="head",
    tied_embeddings=True,
    recurrence="short-conv",
    recurrent_layers=2,
    conv_kernel=3,
)

TORCHTUNE = Setup(model=LLAMA, seq_len=512, micro_batch_size=2, loss="chunked")
TORCHTITAN = replace(TORCHTUNE, engine="torchtitan", precision="bf16-mixed", loss="plain")
TRANSFORMERS = replace(TORCHTUNE, engine="transformers", loss="plain")
DEEPSPEED = replace(TORCHTUNE, engine="deepspeed", precision="bf16-mixed", loss="recomputed")


def fsdp(processes: int) -> dict[str, Any]:
    return {"sharding": "fsdp", "shard": processes}


def zero(stage: int, processes: int) -> dict[str, Any]:
    return {"sharding": f"zero{stage}", "shard": processes}
