"""A tiny model of every family supported by the loop, and runs of all of them in one process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from estimator.vocabulary import METHODS as ALL_METHODS
from launchers import engines
from launchers.engines.loop import quantized_model
from launchers.gang.job import TrainJob
from launchers.models import causal, packed_masks
from launchers.models.hf_layout import safetensors_header
from launchers.report import telemetry
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs

SHARDINGS = {"zero2": "deepspeed", "zero3": "deepspeed", "fsdp2": "fsdp2"}
RESUMED = ("zero2", "fsdp2")  # one of each engine: ZeRO-3 takes as long as both
METHODS = ("full", "lora")
DOCUMENTS, STEPS = 4, 4  # each step sees the same documents, all of them
CHECKPOINT = 2
GANG_LIMIT_S = 1800
LOG_CHARACTERS = 20_000  # of the ranks' output, shown with a test that fails
SAME = 1e-5  # logits of one model, in fp32
CLOSE = 1e-4  # losses of one model whose sums are in another order

_WIDTHS: dict[str, Any] = {
    "vocab_size": runs.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: dict[str, Any] = _WIDTHS | {"head_dim": 16}
_ALIKE_HEADS: dict[str, Any] = _WIDTHS | {"num_key_value_heads": 4}
_ROUTED: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LOCAL: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SHARED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: dict[str, Any] = _SHARED | {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# More than a row's tokens are selected: which of equal scores are is arbitrary
_INDEXER = {"q_lora_rank": 24, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 128}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_WINDOW: dict[str, Any] = {"sliding_window": 16}
_BOTH_KINDS: dict[str, Any] = _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}

# Fields of config.json. Windows and chunks are shorter than two documents, so that they are looked at.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _HEADS,
    "llama4_text": _HEADS
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 48,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "floor_scale": 8,
    },
    "mistral": _HEADS | _WINDOW,
    "ministral": _HEADS | _WINDOW,
    "mixtral": _HEADS | _LOCAL,
    "qwen2": _WIDTHS,
    "qwen2_moe": _WIDTHS | _ROUTED | {"shared_expert_intermediate_size": 48},
    "qwen3": _HEADS,
    "qwen3_moe": _HEADS | _ROUTED | {"decoder_sparse_step": 1},
    "gemma": _HEADS,
    # caps so low that they are felt: the published ones are 50 and 30
    "gemma2": _HEADS | _BOTH_KINDS | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    "gemma3_text": _HEADS | _BOTH_KINDS,
    "gemma4_text": _HEADS
    | _WINDOW
    | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": runs.VOCAB,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    },
    "olmo2": _WIDTHS | {"tie_word_embeddings": False},
    "phi": _WIDTHS,
    "phi3": _WIDTHS | _WINDOW,
    "deepseek_v2": _ALIKE_HEADS | _LATENT | {"q_lora_rank": None, "topk_method": "greedy", "head_dim": 8},
    "deepseek_v3": _ALIKE_HEADS | _LATENT | {"q_lora_rank": 24},
    "deepseek_v32": _ALIKE_HEADS | _LATENT | _INDEXER,
    # some documents are shorter than the window of the second block
    "deepseek_v4": _WIDTHS
    | _ROUTED
    | {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "q_lora_rank": 32,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 64,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "mlp_layer_types": ["hash_moe", "moe"],
        "sliding_window": 16,
        "partial_rotary_factor": 0.25,
    },
    "glm4_moe_lite": _ALIKE_HEADS | _LATENT | {"q_lora_rank": 24},
    "glm_moe_dsa": _ALIKE_HEADS | _LATENT | _INDEXER | {"indexer_types": ["full", "shared"]},
    "mistral4": _ALIKE_HEADS | _LATENT | {"q_lora_rank": 24},
    "gpt_oss": _HEADS
    | _LOCAL
    | _BOTH_KINDS
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "granite": _WIDTHS,
    "olmo3": _WIDTHS | _BOTH_KINDS | {"tie_word_embeddings": False},
    "smollm3": _WIDTHS | {"no_rope_layers": [1, 0]},
    "ministral3": _HEADS
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "glm4": _HEADS,
    "glm4_moe": _HEADS | _SHARED | {"use_qk_norm": True},
    "exaone4": _HEADS | _BOTH_KINDS,
    "ernie4_5": _HEADS,
    "ernie4_5_moe": _WIDTHS
    | {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_intermediate_size": 48,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
    "hunyuan_v1_dense": _HEADS,
    "seed_oss": _HEADS | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "minimax_m2": _HEADS | _LOCAL,
    "qwen3_next": _HEADS | _DELTA | _ROUTED | {"shared_expert_intermediate_size": 48, "mlp_only_layers": [0]},
    "qwen3_5_text": _HEADS | _DELTA,
    "qwen3_5_moe_text": _HEADS | _DELTA | _ROUTED | {"shared_expert_intermediate_size": 48},
    "lfm2": _WIDTHS | {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 32},
    "lfm3": _HEADS
    | _WINDOW
    | {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "conv_L_cache": 3,
    },
    "nemotron_h": _HEADS
    | _SHARED
    | {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "moe_shared_expert_intermediate_size": 48,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
    },
    "granitemoehybrid": _WIDTHS
    | _LOCAL
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 48,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "gpt_neox": {name: value for name, value in _WIDTHS.items() if name != "num_key_value_heads"},
    "gptj": {
        "vocab_size": runs.VOCAB,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 8,
        "n_positions": 128,
    },
    "falcon": {
        "vocab_size": runs.VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": runs.VOCAB, "max_seq_len": 128},
    "stablelm": _WIDTHS,
}


UNTRIED: dict[str, dict[str, Any]] = {
    "cohere": _WIDTHS,
    "helium": _HEADS,
    "gpt2": {"vocab_size": runs.VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}

# Published values are 1 to 16 (Granite), and 0.0625 to 1 (Cohere)
LOGIT_SCALES: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 4.0},
    "granitemoehybrid": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25},
}


def repeated(family: str, times: int = 2) -> dict[str, Any]:
    """Return fields of config.json that repeat a tiny model's blocks, of all their kinds."""
    config = FAMILIES[family]
    layers = {"num_hidden_layers": config["num_hidden_layers"] * times}
    return layers | {name: kinds * times for name, kinds in config.items() if isinstance(kinds, list)}


def network(family: str, **values: Any) -> Any:
    """Return a model of that family with random weights, large enough that tokens change each other's logits.

    ``values`` are fields of config.json in place of those above.
    """
    from transformers import AutoConfig

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **((FAMILIES | UNTRIED)[family] | values))
    config.initializer_range = 0.1
    return packed_masks.separate_documents(causal.class_of(config).from_config(config)).eval()


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A family trained by one method with one sharding: a full run, and one resumed from its checkpoint."""

    family: str
    method: str
    sharding: str
    whole: TrainJob  # ends a step before the other
    resumed: TrainJob | None

    @property
    def losses(self) -> list[float]:
        return runs.losses(runs.steps(self.whole))

    @property
    def after(self) -> list[telemetry.Step]:
        """The steps after the checkpoint."""
        return [] if self.resumed is None else runs.steps(self.resumed)


def prove(
    folder: Path,
    sharding: str,
    families: Sequence[str] = tuple(FAMILIES),
    methods: Sequence[str] = METHODS,
) -> list[Proof]:
    """Train each family by each method, all of them in one group of two processes.

    A run that fails leaves no steps, which :func:`problems` says.
    """
    models = folder.parent / "models"
    data = runs.make_data(folder / "data", documents(), batch=DOCUMENTS, steps=STEPS)
    proofs = []
    for family in families:
        if not (models / family).is_dir():
            network(family).save_pretrained(models / family)
        for method in methods:
            job = runs.make_job(
                folder / family / method,
                models / family,
                data,
                steps=STEPS - 1,
                engine=SHARDINGS[sharding],
                sharding="fsdp" if sharding == "fsdp2" else sharding,
                settings={
                    "method": method,
                    "lora": {"rank": 4, "targets": "all-linear"},
                    "optimizer": {"lr": 1e-2 if method == "full" else 2e-2},
                    "schedule": {"name": "constant", "warmup_steps": 0},
                },
                checkpoint_every=CHECKPOINT,
            )
            resumed_steps = (
                None
                if sharding not in RESUMED
                else dataclasses.replace(
                    runs.resumed(job, folder / family / f"{method}-resumed", CHECKPOINT),
                    total_steps=STEPS,
                    keeps_result=False,
                )
            )
            proofs.append(
                Proof(family=family, method=method, sharding=sharding, whole=job, resumed=resumed_steps)
            )
    jobs = [job for proof in proofs for job in (proof.whole, proof.resumed) if job is not None]
    done = ranks.train_in_turn(jobs, GANG_LIMIT_S)
    print(done.stderr[-LOG_CHARACTERS:])
    return proofs


def problems(proof: Proof, resumed: Proof, folder: Path) -> list[str]:
    """List what is wrong with a finished proof; its result is exported into the empty folder.

    ``resumed`` is the same training with a sharding that was resumed; it has the loss after the last step.
    """
    full, after = runs.steps(proof.whole), resumed.after
    if len(full) != STEPS - 1 or len(after) != STEPS - CHECKPOINT:
        return [f"it took {len(full)} and {len(after)} steps instead of {STEPS - 1} and {STEPS - CHECKPOINT}"]
    messages = []
    start = loss(_base(proof).eval())
    if abs(proof.losses[0] - start) > CLOSE:
        messages.append("it does not begin with the model's own loss")
    if not proof.losses[-1] < proof.losses[0]:
        messages.append("its loss does not fall")
    if max(abs(one - other) for one, other in zip(proof.losses, resumed.losses, strict=True)) > CLOSE:
        messages.append(f"its losses are not those of {resumed.sharding}")
    if proof.after and reported(full[CHECKPOINT]) != reported(proof.after[0]):
        messages.append("it does not resume from its checkpoint bit by bit")
    engines.get(SHARDINGS[proof.sharding]).collect(proof.whole, folder)
    if _names(folder / "model") != _names(proof.whole.model_dir):
        messages.append("its export has other tensors than the base")
    exported = causal.load(folder / "model", dtype=torch.float32).eval()
    if abs(loss(exported) - runs.losses(after)[-1]) > CLOSE:
        messages.append("its export has another loss than what it has trained")
    if proof.method != "full":
        messages += _adapter_problems(proof, folder, exported)
    return messages


def _base(proof: Proof) -> Any:
    """Load the model that the training started from; for qlora with the values of its quantized weights."""
    base = causal.load(proof.whole.model_dir, dtype=torch.float32)
    if ALL_METHODS[proof.method].quantized:
        quantized_model.round_layers(base, proof.whole.settings.lora.quantization)
    return base


def _adapter_problems(proof: Proof, folder: Path, merged: Any) -> list[str]:
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(_base(proof), str(folder / "adapter")).eval()
    tokens = torch.arange(3, 33)[None]
    with torch.no_grad():
        difference = (merged(tokens).logits - adapted(tokens).logits).abs().max()
    return [] if difference < 5 * SAME else [f"merged it is {difference:.0e} off its adapter"]


def reported(step: telemetry.Step) -> tuple[object, ...]:
    """Return the values of a step that must be equal in a resumed and an undisturbed run."""
    return (step.step, step.loss, step.grad_norm, step.lr)


def _names(folder: Path) -> set[str]:
    return {name for path in folder.glob("*.safetensors") for name in safetensors_header(path)}


def documents() -> list[Any]:
    return runs.documents(DOCUMENTS)


def loss(model: Any) -> float:
    """Return the mean loss of the documents of the runs, each alone."""
    return runs.mean_loss(model, documents())
