"""The words that published tables use, and what they mean here. To teach it a word, add it to a table.

Every function takes the text of one cell and gives a kind that :class:`estimator.setup.Setup` knows; it
raises :class:`UnsupportedRow`, whose text says why, where the text names something that nobody here predicts.
"""

from __future__ import annotations

import re
from typing import Literal

from estimator.models import ATTENTION_PROJECTIONS, PROJECTIONS
from estimator.setup import Checkpointing, Engine, Fp8, LossKind, Method, Optimizer, Quantization, Task

Kind = Literal["active", "allocated", "reserved", "process", "needed"]
UNKNOWN_KIND = "active, allocated or reserved is not known"


class UnsupportedRow(Exception):  # noqa: N818 - a row that is left out, with the reason, is no error
    """A row that can't be scored; its text says why."""


# Beginnings (engine is the first whose word the text contains); DeepSpeed before Hugging Face, as the
# Trainer hands states and steps over to it; "megatron-deepspeed" keeps DeepSpeed's states.
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

# Frameworks with a loop of their own around transformers' models and PEFT's adapters: read as the engine
# that is nearest, and marked so (:func:`alias_of`).
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
    """The engine behind a framework's name; the nearest one where it has a loop of its own."""
    text = framework.lower()
    for word, engine in (*_ENGINES, *_ALIASES):
        if word in text:
            return engine
    raise UnsupportedRow(f"framework {framework!r} is not claimed")


def alias_of(framework: str) -> str | None:
    """The engine that a framework is read as where it isn't that engine itself; None where it is."""
    text = framework.lower()
    if any(word in text for word, _ in _ENGINES):
        return None
    return next((engine for word, engine in _ALIASES if word in text), None)


def version_of(framework: str, engine: Engine) -> str:
    """The version of ``estimator/data/implementations.csv`` whose code the framework ran; "" is today's.

    torchtitan had both FSDPs in spring 2024 alone, torchtune's norms kept less up to 0.4, and litgpt's tables
    of October 2023 and January 2024 are from before it trained quantised models with StableEmbedding.
    """
    if engine == "torchtitan" and framework.endswith(("/FSDP1", "/FSDP2")):
        return "2024-05"
    if engine == "litgpt" and "@8641822" in framework:
        return "2023-10"
    if engine == "torchtitan" and "graph_trainer" in framework:
        return "graph"
    if engine == "transformers" and not _TRAINER.search(framework):
        return "loop"
    return "0.4" if engine == "torchtune" and framework.endswith(" 0.4") else ""


# Frameworks that train with transformers' Trainer; others around transformers have a loop of their own.
_TRAINER = re.compile("trainer|trl|sft|swift|axolotl|factory|autotrain|unsloth|alpaca", re.IGNORECASE)
# Frameworks that prepare a quantised model otherwise than PEFT's prepare_model_for_kbit_training does
_OWN_PREPARATION = re.compile("raw loop|fsdp|unsloth|axolotl|factory", re.IGNORECASE)


def upcasts_frozen(framework: str, quant: str, engine: Engine, *, quantised: bool) -> bool:
    """Whether norms, embeddings and head of a quantised base are kept in fp32.

    PEFT's prepare_model_for_kbit_training (peft/utils/other.py) casts what bitsandbytes doesn't quantise; it
    leaves GPTQ's and AWQ's models as they are, and nobody calls it where 4-bit weights are stored in bf16 for
    FSDP.
    """
    if engine not in ("transformers", "deepspeed") or not quantised:
        return False
    return not (_OWN_PREPARATION.search(framework) or re.search("gptq|awq|hqq|storage", quant.lower()))


def fused_optimizer_of(text: str) -> bool | None:
    """Whether AdamW is one kernel (True) or torch's foreach (False); None where the cell doesn't say."""
    words = text.lower()
    if "foreach=false" in words or ("fused" in words and "unfused" not in words):
        return True
    return False if "foreach" in words else None


# Methods that begin like a claimed one and are another.
_OTHER_METHODS = ("adalora", "lora-fa", "lorafa", "longlora", "weights only", "model init only", "galore")


def method_of(text: str) -> tuple[Method, Task, bool, bool]:
    """(method, task, whether the base is quantised, whether embeddings and head are trained whole)."""
    words = text.lower().strip()
    if any(other in words for other in _OTHER_METHODS):
        raise UnsupportedRow(f"method {text!r} is not claimed")
    tasks: tuple[Task, ...] = ("orpo", "dpo", "reward")
    task: Task = next((task for task in tasks if task in words), "sft")
    bare = re.sub(r"\(.*?\)|[-_+ ]*(dpo|orpo|reward|sft|pretrain|finetun\w*|fine-?tun\w*)", "", words)
    bare = re.sub(r"^(custom|bnb|hf|peft)[-_ ]", "", bare)
    embeddings = bool(re.search(r"\+ ?(emb|lm_head|head)\w*", bare))
    bare = re.sub(r"\+ ?(emb|lm_head|head)\w*", "", bare).strip(" -_+")
    if bare in ("full", "fft", "", "freeze-none"):
        return "full", task, False, False
    if bare in ("lora", "rslora", "lora-rs", "lora+"):  # scaled or stepped differently, stored alike
        return "lora", task, False, embeddings
    if bare == "qlora":
        return "lora", task, True, embeddings
    if bare in ("adapter", "adapter_v2"):  # litgpt's commands: finetune_adapter and finetune_adapter_v2
        return ("adapter-v2" if bare == "adapter_v2" else "adapter-v1"), task, False, embeddings
    if bare in ("dora", "lora-dora", "qdora", "qlora-dora"):
        return "dora", task, bare.startswith("q"), embeddings
    raise UnsupportedRow(f"method {text!r} is not claimed")


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
    "c_proj": ("o_proj", "down_proj"),  # GPT-2 and Qwen 1 call both so, and PEFT finds both
    **dict.fromkeys(("all", "all-linear", "all_linear", "linear", "all linear"), PROJECTIONS),
    **dict.fromkeys(("head", "lm_head", "output", "output_layer"), ("lm_head",)),
    **dict.fromkeys(
        ("wte", "embed_tokens", "embed", "emb", "embedding", "word_embeddings"), ("embed_tokens",)
    ),
}


def targets_of(text: str) -> tuple[str, ...]:
    """LoRA's target modules by Hugging Face's names; () where the text is blank."""
    bare = re.sub(r"\(.*?\)", "", text.lower()).strip()
    tokens = [token.strip() for token in re.split(r"[,;|/+]|\s(?!linear)", bare) if token.strip()]
    modules: list[str] = []
    for token in tokens:
        if token in ("w1", "w2", "w3"):  # Llama's own names where there are three, Qwen 1's where two
            llama = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
            qwen = {"w1": "up_proj", "w2": "gate_proj"}
            modules.append((llama if "w3" in tokens else qwen)[token])
        elif token in _TARGETS:
            modules += _TARGETS[token]
        else:
            raise UnsupportedRow(f"LoRA target {token!r} is not known")
    return tuple(dict.fromkeys(modules))


def quantization_of(text: str, quantised: bool) -> Quantization:
    """How the frozen base is stored. ``quantised``: the method says that it is, whatever this cell says."""
    words = text.lower()
    if re.search(r"aqlm|nvfp4|\b[23]-?bit", words):
        raise UnsupportedRow(f"quantization {text!r} is not claimed")
    if re.search("nf4|fp4|4-?bit|int4|awq", words):  # bitsandbytes lays FP4 out like NF4
        # torchao's NF4Tensor always quantises its scales again. GPTQ and AWQ keep a 16-bit scale and a 4-bit
        # zero for each 128 weights: 0.52 B a weight, as NF4 with double quantisation
        double = re.search(r"dq|double|torchao|gptq|awq|hqq", words)
        return "nf4-double" if double else "nf4"
    if "int8" in words or "8bit" in words or "8-bit" in words:
        return "int8"
    if words.strip() in ("", "none", "16bit", "32bit", "bf16", "no", "0"):
        return "nf4" if quantised else "none"
    raise UnsupportedRow(f"quantization {text!r} is not known")


def optimizer_of(text: str) -> Optimizer:
    """The optimizer; a blank cell is AdamW."""
    words = text.lower()
    if re.search(r"lora-fa|galore|lion|lomo|badam|apollo|shampoo|soap|lamb", words):
        raise UnsupportedRow(f"optimizer {text!r} is not claimed")
    eight, paged = re.search(r"8[- _]?bit", words), "paged" in words
    if "muon" in words:
        return "muon"
    if "adafactor" in words:
        return "adafactor"
    if "sgd" in words:
        return "sgd"
    if "adam" not in words and "anyprecision" not in words and words.strip():
        raise UnsupportedRow(f"optimizer {text!r} is not known")
    if re.search(r"4[- _]?bit", words):
        return "adamw4bit"
    if paged:
        return "paged-adamw8bit" if eight else "paged-adamw"
    return "adamw8bit" if eight else "adamw"


def checkpointing_of(text: str) -> Checkpointing | None:
    """The activation checkpointing; None for a blank cell."""
    words = text.lower().strip()
    if not words:
        return None
    if words in ("0", "false", "no", "off") or words.startswith("none") or words.endswith(":none"):
        return "none"
    if words.startswith(("select", "sac")) or re.search("budget|every|layers", words):
        return "selective"
    if words.startswith(("full", "1", "true", "yes", "on", "block", "unsloth")):
        return "full"
    raise UnsupportedRow(f"activation checkpointing {text!r} is not known")


def loss_of(text: str, engine: Engine, seq_len: int) -> tuple[LossKind, int]:
    """(kind of loss, number of its chunks); a blank cell is what the engine does."""
    words = text.lower()
    chunks = 8  # torchtune's and torchtitan's default number
    if engine == "composer" or "triton" in words:  # llm-foundry's loss_fn is flash-attn's kernel
        return "kernel", chunks
    if not words.strip():
        return ("chunked" if engine in ("torchtune", "litgpt") else "plain"), _litgpt_chunks(engine, seq_len)
    if re.search(r"liger|fused|cut[- ]?ce|cce", words):
        return "fused", chunks
    if "recomputed" in words:  # launchers/dataset/batches.py: the logits' fp32 copy is made again
        return "recomputed", chunks
    if "chunk" in words:
        if count := re.search(r"(\d+) chunks", words):
            return "chunked", int(count[1])
        if size := re.search(r"chunk\w* \((\d+)\)", words):
            return "chunked", max(1, -(-seq_len // int(size[1])))
        return "chunked", _litgpt_chunks(engine, seq_len)
    return "plain", chunks


def _litgpt_chunks(engine: Engine, seq_len: int) -> int:
    """litgpt cuts the sequence into pieces of 128 tokens (litgpt/utils.py, chunked_cross_entropy)."""
    return max(1, -(-seq_len // 128)) if engine == "litgpt" else 8


def fp8_of(compute: str, engine: Engine) -> Fp8:
    """Low-precision matrix products. A bare "FP8" is the engine's own: torchao's, or TransformerEngine's."""
    words = compute.lower()
    for word, kind in (
        ("mxfp8", "mxfp8"),
        ("nvfp4", "nvfp4"),
        ("rowwise", "rowwise"),
        ("tensorwise", "tensorwise"),
    ):
        if word in words:
            return kind  # type: ignore[return-value]
    if level := re.search(r"ms-?amp.*?o([123])", words):
        return f"msamp-o{level[1]}"  # type: ignore[return-value]
    if not re.search("fp8|float8", words):
        return "none"
    return "tensorwise" if engine in ("torchtitan", "torchtune") else "te"


def attention_of(text: str) -> Literal["flash", "math"]:
    """Whether scores of all pairs of tokens are kept. A blank cell is PyTorch's SDPA, which keeps none."""
    words = text.lower().strip()
    return "math" if re.search(r"math|eager|naive|no[- _]?flash|^0$|false|^no$", words) else "flash"


def kind_of(text: str) -> Kind:
    """What was measured: of torch.cuda's three counters, the whole process, or the least that will do."""
    words = text.lower()
    if not words:
        raise UnsupportedRow("no memory was measured")
    if re.search(r"init|weights|load|post-optimizer|steady", words):
        raise UnsupportedRow(f"memory of kind {text!r} is not the peak of a training step")
    if "estimate" in words:
        raise UnsupportedRow("an estimate, not a measurement")
    for kind in ("needed", "reserved", "active", "allocated"):
        if kind in words:
            return kind
    if "nvidia-smi" in words or "nvml" in words or "process" in words:
        return "process"
    raise UnsupportedRow(f"memory of kind {text!r}: {UNKNOWN_KIND}")


def fixed_length(packing: str) -> bool:
    """Whether every batch has seq_len tokens a sequence."""
    words = packing.lower()
    return not re.search(r"variable|unpacked|unpadded|dynamic|batch longest|^no\b|^0$|not packed", words)
