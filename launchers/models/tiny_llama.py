"""tiny-llama: a generated Llama-3-shaped checkpoint of 5.2 million random parameters.

It can be used like any published checkpoint: Hugging Face layout, safetensors, a real BPE tokenizer, a chat
template. Its generation needs numpy, safetensors and tokenizers, but not torch.

With the configuration of a larger Llama or Qwen 3 (:func:`config_of`), a checkpoint of that shape is
generated without a download, for measurements of memory and speed, which do not depend on the values of the
weights.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from estimator.errors import UserError
from estimator.models import ModelSpec
from launchers.base.workdir import make_folder
from launchers.dataset import python_docs, support_tickets

if TYPE_CHECKING:
    from tokenizers import Tokenizer  # type: ignore[import-untyped,unused-ignore]

VOCAB_SIZE = 4096  # vocabulary of the tokenizer and of tiny-llama
# QLoRA needs matrix sizes that are multiples of 64 * 256 (NF4's block times the block of its scales)
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
    "rope_theta": 500000.0,  # read by transformers before 5 and by torchtune
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}

# Families of config_of with transformers' class of each; Qwen 3 normalizes the heads of queries and keys
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Maximum number of random values in a matrix; larger matrices, which tiny-llama does not have, repeat them
_RANDOM_VALUES = 2**22
_FILE_BYTES = 2**30  # a file of weights that has reached this size is followed by another

# Special tokens of Llama 3; the rest of the vocabulary is <|reserved_special_token_N|>
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


def config_of(spec: ModelSpec, dtype: str = "bfloat16") -> dict[str, Any]:
    """Build the config.json of a model, with weights of type ``dtype``: float32 or bfloat16.

    Raises UserError for a model that is not a plain Llama or Qwen 3.
    """
    if spec.family not in CLASSES or spec.experts or spec.qkv_bias or spec.o_bias or spec.mlp_bias:
        raise UserError(
            f"{spec.name} ({spec.family}) cannot be generated with random weights: only plain Llamas and "
            "Qwen 3 can.",
            "Choose one from the table, such as llama-3.2-1b, llama-3.1-8b or qwen3-1.7b.",
        )
    rope: dict[str, Any] = {"rope_theta": spec.rope_theta, "rope_type": spec.rope_scaling_type or "default"}
    if spec.rope_scaling_type is not None:
        rope |= {
            "factor": spec.rope_scaling_factor,
            "low_freq_factor": spec.rope_low_freq_factor,
            "high_freq_factor": spec.rope_high_freq_factor,
            "original_max_position_embeddings": spec.rope_original_max_seq_len,
        }
    return CONFIG | {
        "architectures": [CLASSES[spec.family]],
        "model_type": spec.family,
        "dtype": dtype,
        "head_dim": spec.head_dim,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "max_position_embeddings": spec.max_seq_len,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": rope,
        "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tied_embeddings,
        "vocab_size": spec.vocab,
    }


def make(folder: Path, seed: int = 0, config: Mapping[str, Any] = CONFIG) -> Path:
    """Generate a checkpoint in ``folder`` atomically and return the folder; an existing one is not changed.

    The same Python version, seed and configuration give the same bytes. tiny-llama takes one or two seconds,
    larger models the time to write them to disk. Every model has tiny-llama's tokenizer, so text uses only
    the first 4096 tokens of a larger vocabulary.
    """
    return make_folder(
        folder, lambda path: _write(path, seed, config), lambda path: (path / "config.json").exists()
    )


def _write(folder: Path, seed: int, config: Mapping[str, Any]) -> None:
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
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_weights(folder, seed, config)
    _write_json(folder / "generation_config.json", {**ids, "do_sample": False})
    _write_json(folder / "config.json", {**config, **ids})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


@dataclass(frozen=True, slots=True)
class _Weight:
    """Tensor to write; ``values`` are repeated if the shape has more elements."""

    name: str
    shape: tuple[int, ...]
    values: NDArray[np.float32]


def _write_weights(folder: Path, seed: int, config: Mapping[str, Any]) -> None:
    """Write the weights to model.safetensors, or, if they are large, to several files with an index."""
    files: list[list[_Weight]] = [[]]
    file_bytes, size = 0, 4 if config["dtype"] == "float32" else 2
    for weight in _weights(seed, config):
        if file_bytes >= _FILE_BYTES:
            files.append([])
            file_bytes = 0
        files[-1].append(weight)
        file_bytes += math.prod(weight.shape) * size
    if len(files) == 1:
        _save(files[0], folder / "model.safetensors", config["dtype"])
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    for name, weights in zip(names, files, strict=True):
        _save(weights, folder / name, config["dtype"])
    index = {weight.name: name for name, weights in zip(names, files, strict=True) for weight in weights}
    total = sum(math.prod(weight.shape) * size for weights in files for weight in weights)
    _write_json(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
    )


def _save(weights: Sequence[_Weight], path: Path, dtype: str) -> None:
    """Write a safetensors file of these weights."""
    if dtype == "float32":
        from safetensors.numpy import save_file

        arrays = {weight.name: np.resize(weight.values, weight.shape) for weight in weights}
        save_file(arrays, path, metadata={"format": "pt"})
        return
    import torch  # numpy has no bfloat16
    from safetensors.torch import save_file as save_tensors

    tensors = {}
    for weight in weights:
        values, size = torch.from_numpy(weight.values).to(getattr(torch, dtype)), math.prod(weight.shape)
        tensors[weight.name] = values.repeat(-(-size // len(values)))[:size].reshape(weight.shape)
    save_tensors(tensors, path, metadata={"format": "pt"})


def _weights(seed: int, config: Mapping[str, Any]) -> Iterator[_Weight]:
    """Generate all tensors of a model in the order of its layers."""
    random = np.random.Generator(np.random.PCG64(seed))
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    vocabulary = config["vocab_size"]
    shared: list[NDArray[np.float32]] = []  # values that all large matrices repeat

    def draw(count: int) -> NDArray[np.float32]:
        return random.standard_normal(count, dtype=np.float32) * np.float32(config["initializer_range"])

    def matrix(name: str, rows: int, columns: int) -> _Weight:
        if rows * columns <= _RANDOM_VALUES:
            return _Weight(name, (rows, columns), draw(rows * columns))
        if not shared:
            shared.append(draw(_RANDOM_VALUES))
        return _Weight(name, (rows, columns), shared[0])

    def norm(name: str, size: int = hidden) -> _Weight:
        return _Weight(name, (size,), np.ones(size, dtype=np.float32))

    yield matrix("model.embed_tokens.weight", vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield norm(f"{prefix}input_layernorm.weight")
        yield matrix(f"{prefix}self_attn.q_proj.weight", queries, hidden)
        yield matrix(f"{prefix}self_attn.k_proj.weight", keys, hidden)
        yield matrix(f"{prefix}self_attn.v_proj.weight", keys, hidden)
        yield matrix(f"{prefix}self_attn.o_proj.weight", hidden, queries)
        if config["model_type"] == "qwen3":
            yield norm(f"{prefix}self_attn.q_norm.weight", head)
            yield norm(f"{prefix}self_attn.k_norm.weight", head)
        yield norm(f"{prefix}post_attention_layernorm.weight")
        yield matrix(f"{prefix}mlp.gate_proj.weight", ffn, hidden)
        yield matrix(f"{prefix}mlp.up_proj.weight", ffn, hidden)
        yield matrix(f"{prefix}mlp.down_proj.weight", hidden, ffn)
    yield norm("model.norm.weight")
    if not config["tie_word_embeddings"]:
        yield matrix("lm_head.weight", vocabulary, hidden)


def _tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer like Llama 3's on the text of the built-in datasets."""
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
    docstrings = (f"{item.name}\n{item.doc}" for item in python_docs.documented())
    messages = (f"{ticket.message}\n{ticket.record}" for ticket in support_tickets.tickets("train"))
    tokenizer.train_from_iterator(itertools.chain(docstrings, messages), trainer)
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
