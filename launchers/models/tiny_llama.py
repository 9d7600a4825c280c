"""tiny-llama: a Llama-3-shaped checkpoint of 5.2 million random parameters, made on the spot.

Everything that handles a real checkpoint handles it: Hugging Face layout, safetensors, a real BPE
tokenizer, a chat template. Needs numpy, safetensors and tokenizers, not torch.
"""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from launchers.dataset import python_docs

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # type: ignore[import-untyped,unused-ignore]

VOCAB_SIZE = 4096
# The size of every matrix is a multiple of 64 * 256 (NF4's block times the block of its scales), as QLoRA
# needs.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "rope_theta": 500000.0,  # where transformers before 5 and torchtune look for it
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

# Llama 3's names; the vocabulary is filled up with <|reserved_special_token_N|>.
BOS, EOS, EOT = "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"
PAD = "<|finetune_right_pad_id|>"
_SPECIAL = (BOS, EOS, PAD, "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", EOT, "<|python_tag|>")
_RESERVED = 8

# Llama 3's split of text into words: https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}"
    "{%- endfor %}{% if add_generation_prompt %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def make(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint into ``folder`` and return it; a folder that is there already is left alone.

    The same Python version and seed give the same bytes. Takes a second or two. The folder appears in one
    step, whole.
    """
    folder = Path(folder)
    if (folder / "config.json").exists():
        return folder
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    temporary.mkdir(parents=True)
    try:
        _write(temporary, seed)
        try:
            temporary.rename(folder)  # replaces an empty folder, too
        except OSError:  # another process was first
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write(folder: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": [tokenizer.token_to_id(EOS), tokenizer.token_to_id(EOT)],
        "pad_token_id": tokenizer.token_to_id(PAD),
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOT,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": CONFIG["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "generation_config.json", {**ids, "do_sample": False})
    _write_json(folder / "config.json", CONFIG | ids)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def _weights(seed: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.Generator(np.random.PCG64(seed))
    hidden, ffn, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head

    def matrix(*shape: int) -> NDArray[np.float32]:
        values = random.standard_normal(shape, dtype=np.float32)
        return values * np.float32(CONFIG["initializer_range"])

    def norm() -> NDArray[np.float32]:
        return np.ones(hidden, dtype=np.float32)

    weights = {"model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": matrix(queries, hidden),
            f"{prefix}self_attn.k_proj.weight": matrix(keys, hidden),
            f"{prefix}self_attn.v_proj.weight": matrix(keys, hidden),
            f"{prefix}self_attn.o_proj.weight": matrix(hidden, queries),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}mlp.gate_proj.weight": matrix(ffn, hidden),
            f"{prefix}mlp.up_proj.weight": matrix(ffn, hidden),
            f"{prefix}mlp.down_proj.weight": matrix(hidden, ffn),
        }
    return weights | {"model.norm.weight": norm(), "lm_head.weight": matrix(VOCAB_SIZE, hidden)}


def _tokenizer() -> Tokenizer:
    """Llama 3's byte-level BPE, trained on the standard library's docstrings."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_SPECIAL) - _RESERVED,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{item.name}\n{item.doc}" for item in python_docs.documented()), trainer)
    special = list(_SPECIAL)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size() - len(special)
    special += [f"<|reserved_special_token_{number}|>" for number in range(missing)]
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B:1",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
    return tokenizer
