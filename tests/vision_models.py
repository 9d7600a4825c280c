"""Tiny vision-language models of four families, with processors, from random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FAMILIES = ("qwen3_vl", "gemma3", "idefics3", "smolvlm")
TOKENS = 4  # of an image, or of a tile of it, for all but qwen3_vl
SIDE = 32  # pixels of the images of all but qwen3_vl
_TOKENS = {  # named special tokens of each family's tokenizer
    "qwen3_vl": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
    "gemma3": {
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
    "idefics3": {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    },
}
_TOKENS["smolvlm"] = _TOKENS["idefics3"]
_PLACES = {  # what a template writes for an image
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
}
_TEMPLATE = (
    "{%% for m in messages %%}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>' }}"
    "{%% for part in m['content'] %%}{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}"
    "{%% endif %%}{%% endfor %%}<|eot_id|>{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|start_header_id|>assistant<|end_header_id|>{%% endif %%}"
)


def make(folder: Path, family: str, *, seed: int = 0) -> Path:
    """Write a tiny model of a family with its tokenizer and image processor into a folder."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer

    from launchers.models import tiny_llama

    tiny_llama.make(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=_TOKENS[family])
    tokenizer.chat_template = _TEMPLATE % _PLACES[family]
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in _TOKENS[family].items()}
    torch.manual_seed(seed)
    config = config_of(family, len(tokenizer), ids)
    model = AutoModelForImageTextToText.from_config(config).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _image_processor(family).save_pretrained(folder)
    if family != "qwen3_vl":
        length = "image_seq_length" if family == "gemma3" else "image_seq_len"
        (folder / "processor_config.json").write_text(json.dumps({length: TOKENS}))
    return folder


def _text(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }


def config_of(family: str, vocabulary: int, ids: dict[str, int]) -> Any:
    """Configuration of a tiny model of a family, with these token ids by name."""
    from transformers import CONFIG_MAPPING

    text = _text(vocabulary)
    small = {"hidden_size": 32, "intermediate_size": 64}
    if family == "qwen3_vl":
        vision = {
            **small,
            "depth": 2,
            "num_heads": 2,
            "patch_size": 8,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 64,
        }
        rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
        tokens = {
            "image_token_id": ids["image_token"],
            "video_token_id": ids["video_token"],
            "vision_start_token_id": ids["vision_bos_token"],
            "vision_end_token_id": ids["vision_eos_token"],
        }
        text["rope_scaling"] = rope
    else:
        vision = {
            **small,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": 8,
        }
        tokens = {"image_token_id": ids["image_token"], "scale_factor": 2}
        text["model_type"] = "llama"
    if family == "gemma3":
        text |= {"model_type": "gemma3_text", "sliding_window": 256}
        tokens = {
            "image_token_index": ids["image_token"],
            "boi_token_index": ids["boi_token"],
            "eoi_token_index": ids["eoi_token"],
            "mm_tokens_per_image": TOKENS,
        }
    return CONFIG_MAPPING[family](text_config=text, vision_config=vision, **tokens)


def _image_processor(family: str) -> Any:
    if family == "qwen3_vl":
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        size = {"shortest_edge": 256, "longest_edge": 4096}
        return Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=size)
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    sizes: dict[str, Any] = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    if family == "smolvlm":
        from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

        return SmolVLMImageProcessorPil(**sizes)
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3ImageProcessorPil(**sizes)
