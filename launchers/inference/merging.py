"""Merge an adapter into its base, for servers that cannot load the adapter."""

from __future__ import annotations

import json
from pathlib import Path

from estimator.errors import UserError
from launchers.inference.conversation import load_finetuned
from launchers.inference.finished import ADAPTER_CONFIG, FinishedModel


def merged(finished: FinishedModel, folder: Path) -> Path:
    """Write the merged model into ``folder``, in bf16 on a machine with GPUs and in fp32 without.

    Raises UserError for LLaMA-Adapters, which cannot be merged into weights.
    """
    import torch

    path = finished.folder / ADAPTER_CONFIG
    if not path.is_file() or json.loads(path.read_text()).get("peft_type") != "LORA":
        raise UserError(
            f"{finished.name} is a LLaMA-Adapter, which no server loads.", "Use it with finetune chat."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load_finetuned(finished, device, folder.with_name(f"{folder.name}-base"))
    model = loaded.model.merge_and_unload()
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    for path in finished.folder.glob("generation_config.json"):
        (folder / path.name).write_text(path.read_text())
    return folder
