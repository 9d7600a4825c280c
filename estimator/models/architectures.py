"""Traits of model families: norms, biases, kind of MLP, names of linear layers.

To add a family, add it to ``FAMILIES``, and to ``hf_config.py`` if its config.json has different field names;
``tests/estimator/models/test_parameters.py`` compares it with the real code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

ATTENTION_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PROJECTIONS = ATTENTION_PROJECTIONS + MLP_PROJECTIONS
RECURRENT_PROJECTIONS = (
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_b",
    "in_proj_a",
    "out_proj",
    "conv_in_proj",
    "conv_out_proj",
    "in_proj",
)
"""Linear layers of the gated delta rule, of short convolutions and of Mamba 2, by transformers' names."""
LATENT_PROJECTIONS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Linear layers of multi-head latent attention (MLA, arXiv:2405.04434), by transformers' names."""
COMPRESSED_PROJECTIONS = ("kv_proj", "o_b_proj")
"""Linear layers of DeepSeek V4's attention besides those of its queries, by transformers' names."""

Norm = Literal["rms", "layer"]
QkNorm = Literal["", "head", "all", "unweighted"]
Recurrence = Literal["", "gated-delta", "mamba2", "short-conv"]
Linears = Mapping[str, tuple[tuple[str, ...], ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Traits implied by a Hugging Face `model_type` without its config.json. The defaults are those of Llama.

    Attributes
    ----------
    norm_bias:
        Whether the norms have a bias next to their weight.
    norms_per_layer:
        Norms over the hidden size in one block: Gemma 2 and 3 have one before and one after each part.
    qk_norm:
        Norms of queries and keys: "head" shares one weight of head_dim among the heads, "all" has one for
        each channel, "unweighted" has none and is in blocks with rotary positions only.
    hidden_act:
        The MLP's activation, by transformers' name.
    attention_dropout:
        Dropout of attention probabilities by default (transformers' configuration class).
    attention_sinks:
        One learned number for each head that takes part in the softmax.
    causal:
        False for an encoder, which attends to the complete text and has no output head.
    recurrence:
        Recurrence of some blocks instead of attention: the gated delta rule (arXiv:2412.06464), Mamba 2
        (arXiv:2405.21060), or a short convolution between two gates.
    gated_attention:
        The query projection is twice as wide, and its other half gates attention's result.
    one_part_blocks:
        A block is only attention, recurrence or MLP, with one norm.
    head_gates:
        A gate for each head, computed from the block's input, scales attention's result.
    router_scales:
        Learned factors of the router's input and of each expert's weight.
    free_head_dim:
        Whether heads * head_dim may differ from the hidden size.
    partial_rotary:
        Whether its code reads ``partial_rotary_factor``, which rotates only a part of each head.
    packing_leak:
        Reason why earlier documents of a packed row influence later ones although positions restart, as
        one clause; blank: they do not. tests/launchers/engines/loop/test_families.py measures it.
    scores_texts:
        Whether transformers has a sequence classification class of the family, as reward models need.
    code_elsewhere:
        Its code is not part of transformers, but stored with the weights on the Hub.
    mlp_names_are_experts:
        PEFT adapts the experts' tensors under the names of the MLP's projections, and never the linear layers
        of dense blocks and shared experts (peft 0.21, utils/transformers_weight_conversion.py).
    prompts_by_code:
        Its repositories have Python code that renders chats (folder `encoding`), and no chat template.
    experts_stay_16_bit:
        transformers 5 implements its experts differently from other families, so QLoRA cannot quantize them.
    linears:
        Names of linear layers in the family's code -> their generic names. Those in one inner tuple are fused
        into one matrix.
    source:
        Source of these traits.
    """

    norm: Norm = "rms"
    norm_bias: bool = False
    norms_per_layer: int = 2
    qk_norm: QkNorm = ""
    gated_mlp: bool = True
    hidden_act: str = "silu"
    causal: bool = True
    scores_texts: bool = True
    parallel_residual: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    attention_dropout: float = 0.0
    attention_sinks: bool = False
    router_bias: bool = False
    shared_expert_gate: bool = False
    pooler: bool = False
    recurrence: Recurrence = ""
    gated_attention: bool = False
    one_part_blocks: bool = False
    head_gates: bool = False
    router_scales: bool = False
    free_head_dim: bool = True
    partial_rotary: bool = False
    packing_leak: str = ""
    code_elsewhere: bool = False
    mlp_names_are_experts: bool = False
    prompts_by_code: bool = False
    experts_stay_16_bit: bool = False
    linears: Linears = field(default_factory=dict)
    source: str

    def traits(self) -> dict[str, Any]:
        """Return the fields that :class:`estimator.models.spec.ModelSpec` has too."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_TRAITS}


def family_of(model_type: str) -> Family:
    """Return a family's traits; those of Llama for a family of transformers that is not listed."""
    return FAMILIES.get(model_type, UNTRIED)


def names_in_transformers(family: str, targets: Iterable[str]) -> tuple[str, ...]:
    """Translate names of linear layers to the family's own names in transformers; other names stay."""
    family_names = {
        generic: name
        for name, groups in family_of(family).linears.items()
        for group in groups
        for generic in group
    }
    return tuple(dict.fromkeys(family_names.get(target, target) for target in targets))


_NOT_TRAITS = (
    "free_head_dim",
    "partial_rotary",
    "packing_leak",
    "code_elsewhere",
    "prompts_by_code",
    "experts_stay_16_bit",
    "mlp_names_are_experts",
    "scores_texts",
    "linears",
    "source",
)

_FUSED_QKV = (("q_proj", "k_proj", "v_proj"),)
_NEOX_LINEARS = {
    "query_key_value": _FUSED_QKV,
    "dense": (("o_proj",),),
    "dense_h_to_4h": (("up_proj",),),
    "dense_4h_to_h": (("down_proj",),),
}


def _transformers(name: str, release: str = "5.4.0") -> str:
    return f"transformers {release}, models/{name}/modeling_{name}.py"


_NEW = "5.23.0"


_LINEAR = "its linear attention carries its state across documents"
_MAMBA = "its Mamba blocks carry their state across documents"
_CONVOLUTION = "its convolutions mix neighboring documents"

UNTRIED = Family(
    partial_rotary=True,
    packing_leak="not measured",
    source="parts of Llama: the specific parts of this family are unknown",
)

FAMILIES: dict[str, Family] = {  # Hugging Face's `model_type`
    "llama": Family(source=_transformers("llama")),
    "llama4_text": Family(
        scores_texts=False,
        experts_stay_16_bit=True,
        packing_leak="its chunks and attention's temperature are counted from the row's first token",
        source=_transformers("llama4"),
    ),
    "mistral": Family(source=_transformers("mistral")),
    "ministral": Family(source=_transformers("ministral")),
    "mixtral": Family(source=_transformers("mixtral")),
    "qwen": Family(
        qkv_bias=True,
        code_elsewhere=True,
        linears={
            "c_attn": _FUSED_QKV,
            "c_proj": (("o_proj",), ("down_proj",)),
            "w1": (("up_proj",),),
            "w2": (("gate_proj",),),
        },
        source="https://huggingface.co/Qwen/Qwen-7B/blob/main/modeling_qwen.py",
    ),
    "qwen2": Family(qkv_bias=True, source=_transformers("qwen2")),
    "qwen2_moe": Family(qkv_bias=True, shared_expert_gate=True, source=_transformers("qwen2_moe")),
    "qwen3": Family(qk_norm="head", source=_transformers("qwen3")),
    "qwen3_moe": Family(qk_norm="head", source=_transformers("qwen3_moe")),
    "gemma": Family(hidden_act="gelu_pytorch_tanh", source=_transformers("gemma")),
    "gemma2": Family(norms_per_layer=4, hidden_act="gelu_pytorch_tanh", source=_transformers("gemma2")),
    "gemma3_text": Family(
        norms_per_layer=4, qk_norm="head", hidden_act="gelu_pytorch_tanh", source=_transformers("gemma3")
    ),
    "gemma4_text": Family(
        scores_texts=False,
        norms_per_layer=4,
        qk_norm="head",
        hidden_act="gelu_pytorch_tanh",
        router_scales=True,
        partial_rotary=True,
        source=_transformers("gemma4", _NEW),
    ),
    "olmo2": Family(scores_texts=False, qk_norm="all", source=_transformers("olmo2")),
    "phi": Family(
        norm="layer",
        norm_bias=True,
        norms_per_layer=1,
        gated_mlp=False,
        hidden_act="gelu_new",
        parallel_residual=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        free_head_dim=False,
        partial_rotary=True,
        linears={"dense": (("o_proj",),), "fc1": (("up_proj",),), "fc2": (("down_proj",),)},
        source=_transformers("phi"),
    ),
    "phi3": Family(
        partial_rotary=True,
        linears={"qkv_proj": _FUSED_QKV, "gate_up_proj": (("gate_proj", "up_proj"),)},
        source=_transformers("phi3"),
    ),
    "deepseek_v2": Family(mlp_names_are_experts=True, source=_transformers("deepseek_v2")),
    "deepseek_v3": Family(mlp_names_are_experts=True, source=_transformers("deepseek_v3")),
    "deepseek_v32": Family(
        scores_texts=False,
        mlp_names_are_experts=True,
        prompts_by_code=True,
        source=_transformers("deepseek_v32", _NEW),
    ),
    "deepseek_v4": Family(
        scores_texts=False,
        prompts_by_code=True,
        attention_sinks=True,
        partial_rotary=True,
        packing_leak="it compresses windows of tokens counted from the row's first token",
        source=_transformers("deepseek_v4", _NEW),
    ),
    "glm4_moe_lite": Family(
        scores_texts=False, mlp_names_are_experts=True, source=_transformers("glm4_moe_lite", _NEW)
    ),
    "glm_moe_dsa": Family(
        scores_texts=False, mlp_names_are_experts=True, source=_transformers("glm_moe_dsa", _NEW)
    ),
    "mistral4": Family(partial_rotary=True, source=_transformers("mistral4", _NEW)),
    "gpt_oss": Family(
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        attention_sinks=True,
        router_bias=True,
        source=_transformers("gpt_oss"),
    ),
    "granite": Family(scores_texts=False, source=_transformers("granite", _NEW)),
    "olmo3": Family(qk_norm="all", source=_transformers("olmo3", _NEW)),
    "smollm3": Family(source=_transformers("smollm3", _NEW)),
    "ministral3": Family(source=_transformers("ministral3", _NEW)),
    "glm4": Family(
        norms_per_layer=4,
        qkv_bias=True,
        partial_rotary=True,
        linears={"gate_up_proj": (("gate_proj", "up_proj"),)},
        source=_transformers("glm4", _NEW),
    ),
    "glm4_moe": Family(
        scores_texts=False,
        partial_rotary=True,
        mlp_names_are_experts=True,
        source=_transformers("glm4_moe", _NEW),
    ),
    "exaone4": Family(qk_norm="head", source=_transformers("exaone4", _NEW)),
    "ernie4_5": Family(scores_texts=False, source=_transformers("ernie4_5", _NEW)),
    "ernie4_5_moe": Family(
        scores_texts=False,
        router_bias=True,
        mlp_names_are_experts=True,
        source=_transformers("ernie4_5_moe", _NEW),
    ),
    "hunyuan_v1_dense": Family(qk_norm="head", source=_transformers("hunyuan_v1_dense", _NEW)),
    "seed_oss": Family(qkv_bias=True, attention_dropout=0.1, source=_transformers("seed_oss", _NEW)),
    "minimax_m2": Family(scores_texts=False, qk_norm="all", source=_transformers("minimax_m2", _NEW)),
    "qwen3_next": Family(
        qk_norm="head",
        shared_expert_gate=True,
        recurrence="gated-delta",
        packing_leak=_LINEAR,
        gated_attention=True,
        partial_rotary=True,
        mlp_names_are_experts=True,
        linears={
            "in_proj_qkvz": (("in_proj_qkv", "in_proj_z"),),
            "in_proj_ba": (("in_proj_b", "in_proj_a"),),
        },
        source=_transformers("qwen3_next", _NEW),
    ),
    "qwen3_5_text": Family(
        qk_norm="head",
        recurrence="gated-delta",
        packing_leak=_LINEAR,
        gated_attention=True,
        partial_rotary=True,
        source=_transformers("qwen3_5", _NEW),
    ),
    "qwen3_5_moe_text": Family(
        scores_texts=False,
        qk_norm="head",
        shared_expert_gate=True,
        recurrence="gated-delta",
        packing_leak=_LINEAR,
        gated_attention=True,
        partial_rotary=True,
        source=_transformers("qwen3_5_moe", _NEW),
    ),
    "lfm2": Family(
        scores_texts=False,
        qk_norm="head",
        recurrence="short-conv",
        packing_leak=_CONVOLUTION,
        linears={
            "in_proj": (("conv_in_proj",),),
            "out_proj": (("o_proj",), ("conv_out_proj",)),
            "w1": (("gate_proj",),),
            "w2": (("down_proj",),),
            "w3": (("up_proj",),),
        },
        source=_transformers("lfm2", _NEW),
    ),
    "lfm3": Family(
        scores_texts=False,
        norms_per_layer=4,
        qk_norm="head",
        recurrence="short-conv",
        packing_leak=_CONVOLUTION,
        head_gates=True,
        partial_rotary=True,
        linears={
            "in_proj": (("conv_in_proj",),),
            "out_proj": (("conv_out_proj",),),
            "w1": (("gate_proj",),),
            "w2": (("down_proj",),),
            "w3": (("up_proj",),),
        },
        source=_transformers("lfm3", _NEW),
    ),
    "nemotron_h": Family(
        scores_texts=False,
        norms_per_layer=1,
        gated_mlp=False,
        hidden_act="relu2",
        recurrence="mamba2",
        packing_leak=_MAMBA,
        one_part_blocks=True,
        source=_transformers("nemotron_h", _NEW),
    ),
    "granitemoehybrid": Family(
        scores_texts=False,
        recurrence="mamba2",
        packing_leak=_MAMBA,
        linears={"input_linear": (("gate_proj", "up_proj"),), "output_linear": (("down_proj",),)},
        source=_transformers("granitemoehybrid", _NEW),
    ),
    "gpt_neox": Family(
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        hidden_act="gelu",
        parallel_residual=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        free_head_dim=False,
        partial_rotary=True,
        linears=_NEOX_LINEARS,
        source=_transformers("gpt_neox"),
    ),
    "gptj": Family(
        norm="layer",
        norm_bias=True,
        norms_per_layer=1,
        gated_mlp=False,
        hidden_act="gelu_new",
        parallel_residual=True,
        mlp_bias=True,
        head_bias=True,
        free_head_dim=False,
        linears={"out_proj": (("o_proj",),), "fc_in": (("up_proj",),), "fc_out": (("down_proj",),)},
        source=_transformers("gptj"),
    ),
    "falcon": Family(
        norm="layer",
        norm_bias=True,
        norms_per_layer=1,
        gated_mlp=False,
        hidden_act="gelu",
        parallel_residual=True,
        free_head_dim=False,
        packing_leak="its mask is made without the positions",  # up to transformers 5.19
        linears=_NEOX_LINEARS,
        source=_transformers("falcon"),
    ),
    "mpt": Family(
        norm="layer",
        gated_mlp=False,
        hidden_act="gelu",
        free_head_dim=False,
        packing_leak="its code takes no positions",
        linears={"Wqkv": _FUSED_QKV, "out_proj": (("o_proj",),)},
        source=_transformers("mpt"),
    ),
    "stablelm": Family(
        norm="layer",
        norm_bias=True,
        free_head_dim=False,
        partial_rotary=True,
        source=_transformers("stablelm"),
    ),
    "bert": Family(
        norm="layer",
        norm_bias=True,
        gated_mlp=False,
        hidden_act="gelu",
        causal=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        pooler=True,
        free_head_dim=False,
        linears={
            "query": (("q_proj",),),
            "key": (("k_proj",),),
            "value": (("v_proj",),),
            "dense": (("o_proj",), ("up_proj",), ("down_proj",), ("pooler",)),
        },
        source=_transformers("bert"),
    ),
}
