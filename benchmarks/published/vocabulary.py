"""Translation of the terms in published tables to values of :class:`estimator.setup.Setup`.

To add a term, add it to a table below. Every function takes the text of one cell; it raises
:class:`UnsupportedRow` with the reason if the estimator doesn't model what the text names.
"""

from __future__ import annotations

import re
from typing import Literal

from estimator.models import ATTENTION_PROJECTIONS, PROJECTIONS
from estimator.vocabulary import Checkpointing, Engine, Fp8, LossKind, Method, Optimizer, Quantization, Task

Kind = Literal["active", "allocated", "reserved", "process", "needed"]
UNKNOWN_KIND = "active, allocated or reserved is not known"


class UnsupportedRow(Exception):  # noqa: N818 - a row that is left out, with the reason, is no error
    """Reason why a row isn't scored."""


# Term -> engine; the first term that the text contains applies. DeepSpeed precedes Hugging Face, as the
# Trainer delegates states and steps to it; "megatron-deepspeed" keeps DeepSpeed's states.
_ENGINES: tuple[tuple[str, Engine], ...] = (
    ("torchtune", "torchtune"),
    ("fsdp2 torch", "fsdp2"),
    ("torchtitan", "torchtitan"),
    ("litgpt", "litgpt"),
    ("lit-gpt", "litgpt"),
    ("deepspeed", "deepspeed"),
    ("composer", "composer"),
    ("foundry", "composer"),
    ("fms-fsdp", "composer"),
    ("megatron", "megatron"),
    ("nemo", "megatron"),
    ("swift", "transformers"),
    ("axolotl", "transformers"),
    ("trl", "transformers"),
    ("peft", "transformers"),
    ("factory", "transformers"),
    ("cookbook", "transformers"),
    ("transformers", "transformers"),
    ("trainer", "transformers"),
    ("accelerate", "transformers"),
    ("hf", "transformers"),
    ("hugging", "transformers"),
)

# Frameworks with a custom training loop around transformers' models and PEFT's adapters -> nearest engine.
# :func:`alias_of` marks their rows.
_ALIASES: tuple[tuple[str, Engine], ...] = (
    ("fsdp_qlora", "transformers"),
    ("raw loop", "transformers"),
    ("unsloth", "transformers"),
    ("alpaca", "transformers"),
    ("llama-recipes", "transformers"),
    ("llama recipes", "transformers"),
    ("fastchat", "transformers"),
    ("lmflow", "transformers"),
    ("autotrain", "transformers"),
    ("open-instruct", "transformers"),
    ("qlora", "transformers"),
)


def engine_of(framework: str) -> Engine:
    """Return the engine of a framework, or the nearest one for a custom training loop."""
    text = framework.lower()
    for word, engine in (*_ENGINES, *_ALIASES):
        if word in text:
            return engine
    raise UnsupportedRow(f"framework {framework!r} is not supported")


def alias_of(framework: str) -> str | None:
    """Return the engine that approximates a framework; None if the framework is an engine itself."""
    text = framework.lower()
    if any(word in text for word, _ in _ENGINES):
        return None
    return next((engine for word, engine in _ALIASES if word in text), None)


def version_of(framework: str, loss: str, notes: str, engine: Engine) -> str:
    """Return the version in ``estimator/data/implementations.csv`` that the framework ran; "" is current.

    torchtitan had both FSDPs only in spring 2024, torchtune's norms stored fewer activations up to 0.4, and
    litgpt's tables of October 2023 and January 2024 predate its use of StableEmbedding for quantized models.
    transformers' use_liger_kernel, which brings Liger's loss, replaces norms and MLPs as well.
    fms-acceleration's fast kernels are Unsloth's RMSNorm and rotary embedding. Rows of Megatron-Bridge note
    the CUDA graphs of their recipe: cuda_graph_impl and cuda_graph_scope in scripts/performance/configs, from
    0.6 on src/megatron/bridge/perf_recipes, at the tag of the release. ``notes``: notes of the row.
    """
    if engine == "megatron":
        return next((version for words, version in _GRAPHS.items() if words in notes), "")
    if engine == "deepspeed" and "liger" in loss.lower():
        return "liger"
    if engine in ("fsdp2", "transformers") and "liger kernels" in loss.lower():
        return "liger"
    if engine == "transformers" and "unsloth triton ce, rmsnorm, rope" in notes.lower():
        return "unsloth"
    if engine == "transformers" and "peft<0.8" in framework.lower():
        return "peft-0.7"
    if engine == "torchtitan" and framework.endswith(("/FSDP1", "/FSDP2")):
        return "2024-05"
    if engine == "litgpt" and "@8641822" in framework:
        return "2023-10"
    if engine == "torchtitan" and "graph_trainer" in framework:
        return "graph"
    if engine == "transformers" and not _TRAINER.search(framework):
        return "loop"
    return "0.4" if engine == "torchtune" and framework.endswith(" 0.4") else ""


_GRAPHS = {
    "one CUDA graph": "full-graph",
    "CUDA graphs of attention and router": "attention-graph",
}
# Frameworks that train with transformers' Trainer; others around transformers have custom loops.
_TRAINER = re.compile("trainer|trl|sft|swift|axolotl|factory|autotrain|unsloth|alpaca", re.IGNORECASE)
# Frameworks that don't prepare a quantized model with PEFT's prepare_model_for_kbit_training
_OWN_PREPARATION = re.compile("raw loop|fsdp|unsloth|axolotl|factory", re.IGNORECASE)


def dispatches_by_expert(notes: str, engine: Engine) -> bool | None:
    """Return whether a token is sent once for each of its experts; None if the notes don't state it."""
    if engine not in ("megatron", "torchtitan"):
        return None
    if re.search("hybridep|deepep", notes.lower()):
        return False
    return True if "all-to-all" in notes.lower() else None


def upcasts_frozen(framework: str, quant: str, notes: str, engine: Engine, *, quantized: bool) -> bool:
    """Return whether norms, embeddings and head of a quantized base are kept in fp32.

    PEFT's prepare_model_for_kbit_training (peft/utils/other.py) casts the modules that bitsandbytes doesn't
    quantize. It doesn't change GPTQ and AWQ models, and isn't called if 4-bit weights are stored in bf16 for
    FSDP. Notes may state that the cast was disabled ("no fp32 upcast").
    """
    if engine not in ("transformers", "deepspeed") or not quantized or "no fp32 upcast" in notes.lower():
        return False
    return not (_OWN_PREPARATION.search(framework) or re.search("gptq|awq|hqq|storage", quant.lower()))


def fused_optimizer_of(text: str) -> bool | None:
    """Return whether AdamW is fused (True) or torch's foreach (False); None if the cell states neither."""
    lower = text.lower()
    if "foreach=false" in lower or ("fused" in lower and "unfused" not in lower):
        return True
    return False if "foreach" in lower else None


# Methods whose names contain that of a supported one.
_OTHER_METHODS = ("adalora", "lora-fa", "lorafa", "longlora", "weights only", "model init only", "galore")


def method_of(text: str) -> tuple[Method, Task, bool, bool]:
    """Return (method, task, whether the base is quantized, whether embeddings and head are fully trained)."""
    lower = text.lower().strip()
    if any(other in lower for other in _OTHER_METHODS):
        raise UnsupportedRow(f"method {text!r} is not supported")
    tasks: tuple[Task, ...] = ("orpo", "dpo", "reward")
    task: Task = next((task for task in tasks if task in lower), "sft")
    bare = re.sub(r"\(.*?\)|[-_+ ]*(dpo|orpo|reward|sft|pretrain|finetun\w*|fine-?tun\w*)", "", lower)
    bare = re.sub(r"^(custom|bnb|hf|peft)[-_ ]", "", bare)
    embeddings = bool(re.search(r"\+ ?(emb|lm_head|head)\w*", bare))
    bare = re.sub(r"\+ ?(emb|lm_head|head)\w*", "", bare).strip(" -_+")
    if bare in ("full", "fft", "", "freeze-none"):
        return "full", task, False, False
    if bare in ("lora", "rslora", "lora-rs", "lora+"):  # other scaling or learning rates, same memory
        return "lora", task, False, embeddings
    if bare == "qlora":
        return "lora", task, True, embeddings
    if bare in ("adapter", "adapter_v2"):  # litgpt's commands: finetune_adapter and finetune_adapter_v2
        return ("adapter-v2" if bare == "adapter_v2" else "adapter-v1"), task, False, embeddings
    if bare in ("dora", "lora-dora", "qdora", "qlora-dora"):
        return "dora", task, bare.startswith("q"), embeddings
    raise UnsupportedRow(f"method {text!r} is not supported")


_ATTENTION_IN = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_TARGETS: dict[str, tuple[str, ...]] = {
    **{name: (name,) for name in PROJECTIONS},
    **dict.fromkeys(("q", "query", "wq", "linear_q"), ("q_proj",)),
    **dict.fromkeys(("k", "key", "wk"), ("k_proj",)),
    **dict.fromkeys(("v", "value", "wv"), ("v_proj",)),
    **dict.fromkeys(
        ("o", "output_proj", "out_proj", "projection", "proj", "wo", "dense", "attn.proj", "linear_proj"),
        ("o_proj",),
    ),
    **dict.fromkeys(
        ("qkv", "qkv_proj", "wqkv", "w_pack", "c_attn", "query_key_value", "linear_qkv", "default"),
        _ATTENTION_IN,
    ),
    **dict.fromkeys(("attn", "attention"), ATTENTION_PROJECTIONS),
    **dict.fromkeys(("mlp", "ffn"), _MLP),
    **dict.fromkeys(("gate_up_proj", "linear_fc1", "dense_h_to_4h"), ("gate_proj", "up_proj")),
    **dict.fromkeys(("fc_1", "gate"), ("gate_proj",)),
    **dict.fromkeys(("fc_2", "fc1", "up"), ("up_proj",)),
    **dict.fromkeys(("linear_fc2", "dense_4h_to_h", "fc2", "down"), ("down_proj",)),
    "c_proj": ("o_proj", "down_proj"),  # both layers have this name in GPT-2 and Qwen 1; PEFT matches both
    **dict.fromkeys(("all", "all-linear", "all_linear", "linear", "all linear"), PROJECTIONS),
    **dict.fromkeys(("head", "lm_head", "output", "output_layer"), ("lm_head",)),
    **dict.fromkeys(
        ("wte", "embed_tokens", "embed", "emb", "embedding", "word_embeddings"), ("embed_tokens",)
    ),
}


def targets_of(text: str) -> tuple[str, ...]:
    """Return LoRA's target modules by their Hugging Face names; () for a blank cell."""
    bare = re.sub(r"\(.*?\)", "", text.lower()).strip()
    tokens = [token.strip() for token in re.split(r"[,;|/+]|\s(?!linear)", bare) if token.strip()]
    modules: list[str] = []
    for token in tokens:
        if token in ("w1", "w2", "w3"):  # Llama's names if w3 occurs, else Qwen 1's
            llama = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
            qwen = {"w1": "up_proj", "w2": "gate_proj"}
            modules.append((llama if "w3" in tokens else qwen)[token])
        elif token in _TARGETS:
            modules += _TARGETS[token]
        else:
            raise UnsupportedRow(f"LoRA target {token!r} is not known")
    return tuple(dict.fromkeys(modules))


def quantization_of(text: str, quantized: bool) -> Quantization:
    """Return the format of the frozen base. ``quantized``: the method is quantized, such as QLoRA."""
    lower = text.lower()
    if re.search(r"aqlm|nvfp4|\b[23]-?bit", lower):
        raise UnsupportedRow(f"quantization {text!r} is not supported")
    if re.search("nf4|fp4|4-?bit|int4|awq", lower):  # FP4 and NF4 have the same layout in bitsandbytes
        # torchao's NF4Tensor always quantizes its scales. GPTQ and AWQ keep a 16-bit scale and a 4-bit
        # zero for each 128 weights: 0.52 B a weight, as NF4 with double quantization
        double = re.search(r"dq|double|torchao|gptq|awq|hqq", lower)
        return "nf4-double" if double else "nf4"
    if "int8" in lower or "8bit" in lower or "8-bit" in lower:
        return "int8"
    if lower.strip() in ("", "none", "16bit", "32bit", "bf16", "no", "0"):
        return "nf4" if quantized else "none"
    raise UnsupportedRow(f"quantization {text!r} is not known")


def optimizer_of(text: str) -> Optimizer:
    """Return the optimizer; a blank cell is AdamW."""
    lower = text.lower()
    if re.search(r"lora-fa|galore|lion|lomo|badam|apollo|shampoo|soap|lamb", lower):
        raise UnsupportedRow(f"optimizer {text!r} is not supported")
    eight, paged = re.search(r"8[- _]?bit", lower), "paged" in lower
    if "muon" in lower:
        return "muon"
    if "adafactor" in lower:
        return "adafactor"
    if "sgd" in lower:
        return "sgd"
    if "adam" not in lower and "anyprecision" not in lower and lower.strip():
        raise UnsupportedRow(f"optimizer {text!r} is not known")
    if re.search(r"4[- _]?bit", lower):
        return "adamw4bit"
    if paged:
        return "paged-adamw8bit" if eight else "paged-adamw"
    return "adamw8bit" if eight else "adamw"


def checkpointing_of(text: str) -> Checkpointing | None:
    """Return the activation checkpointing; None for a blank cell."""
    lower = text.lower().strip()
    if not lower:
        return None
    if lower in ("0", "false", "no", "off") or lower.startswith("none") or lower.endswith(":none"):
        return "none"
    if lower.startswith(("select", "sac")) or re.search("budget|every|layers", lower):
        return "selective"
    if lower.startswith(("full", "1", "true", "yes", "on", "block", "unsloth")):
        return "full"
    raise UnsupportedRow(f"activation checkpointing {text!r} is not known")


def loss_of(text: str, engine: Engine, seq_len: int) -> tuple[LossKind, int]:
    """Return (kind of loss, number of chunks); a blank cell is the engine's default."""
    lower = text.lower()
    chunks = 8  # torchtune's and torchtitan's default number
    if engine == "composer" or "triton" in lower:  # llm-foundry's loss_fn is flash-attn's kernel
        return "kernel", chunks
    if not lower.strip():
        return ("chunked" if engine in ("torchtune", "litgpt") else "plain"), _litgpt_chunks(engine, seq_len)
    if re.search(r"liger|fused|cut[- ]?ce|cce", lower):
        return "fused", chunks
    if "recomputed" in lower:  # launchers/dataset/batches.py recomputes the fp32 copy of the logits
        return "recomputed", chunks
    if "chunk" in lower:
        if count := re.search(r"(\d+) chunks", lower):
            return "chunked", int(count[1])
        if size := re.search(r"chunk\w* \((\d+)\)", lower):
            return "chunked", max(1, -(-seq_len // int(size[1])))
        return "chunked", _litgpt_chunks(engine, seq_len)
    return "plain", chunks


def _litgpt_chunks(engine: Engine, seq_len: int) -> int:
    """Return the number of chunks: litgpt's have 128 tokens (litgpt/utils.py, chunked_cross_entropy)."""
    return max(1, -(-seq_len // 128)) if engine == "litgpt" else 8


def fp8_of(compute: str, engine: Engine) -> Fp8:
    """Return the low-precision recipe. "FP8" alone is the engine's: torchao's, or TransformerEngine's."""
    lower = compute.lower()
    for word, kind in (
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
        ("rowwise", "rowwise"),
        ("tensorwise", "tensorwise"),
    ):
        if word in lower:
            return kind  # type: ignore[return-value]
    if level := re.search(r"ms-?amp.*?o([123])", lower):
        return f"msamp-o{level[1]}"  # type: ignore[return-value]
    if not re.search("fp8|float8", lower):
        return "none"
    return "tensorwise" if engine in ("torchtitan", "torchtune") else "te"


def attention_of(text: str) -> Literal["flash", "math"]:
    """Return the attention: "math" stores all scores. A blank cell is PyTorch's SDPA, which stores none."""
    lower = text.lower().strip()
    return "math" if re.search(r"math|eager|naive|no[- _]?flash|^0$|false|^no$", lower) else "flash"


def flash_version_of(text: str, engine: Engine) -> int:
    """Return the version of FlashAttention: llm-foundry's runs of 2023 had 1, PyTorch has 2."""
    if match := re.search(r"fl(?:ash)?[a-z]*[-_ ]?(?:attention|attn)?[-_ ]?v?([1-4])", text.lower()):
        return int(match[1])
    return 1 if engine == "composer" and "flash" in text.lower() else 2


def kind_of(text: str) -> Kind:
    """Return the kind of peak: a counter of torch.cuda, the whole process, or the minimum needed to run."""
    lower = text.lower()
    if not lower:
        raise UnsupportedRow("no memory was measured")
    if re.search(r"init|weights|load|post-optimizer|steady", lower):
        raise UnsupportedRow(f"memory of kind {text!r} is not the peak of a training step")
    if "estimate" in lower:
        raise UnsupportedRow("an estimate, not a measurement")
    for kind in ("needed", "reserved", "active", "allocated"):
        if kind in lower:
            return kind
    if "nvidia-smi" in lower or "nvml" in lower or "process" in lower:
        return "process"
    raise UnsupportedRow(f"memory of kind {text!r}: {UNKNOWN_KIND}")


def document_tokens_of(packing: str) -> int | None:
    """Return the stated mean length of packed documents, each weighted by its tokens; None if not stated."""
    match = re.search(r"documents kept apart, of ([\d,]+) tokens", packing.lower())
    return int(match[1].replace(",", "")) if match else None


def fixed_length(packing: str) -> bool:
    """Return whether every sequence has seq_len tokens."""
    lower = packing.lower()
    return not re.search(r"variable|unpacked|unpadded|dynamic|batch longest|^no\b|^0$|not packed", lower)
