"""Command that converts a finished model to GGUF, the file format of llama.cpp."""

from __future__ import annotations

import json
import shlex
from functools import cache
from pathlib import Path

from estimator.data import load_rows

_TABLE = Path(__file__).with_name("gguf.csv")


@cache
def supported_architectures() -> frozenset[str]:
    """Return the names of architectures, as in config.json, that llama.cpp's converters support."""
    return frozenset(row["architecture"] for row in load_rows(_TABLE))


def command(result: Path, base: Path, base_name: str) -> str | None:
    """Return the command that converts a model or adapter, named ``this/folder`` in it; None if unsupported.

    ``result``: folder of the model or adapter. ``base``: folder with the configuration of the model that was
    fine-tuned. ``base_name``: that model's folder or Hugging Face id.
    """
    config = result / "config.json" if (result / "config.json").is_file() else base / "config.json"
    architectures = json.loads(config.read_text()).get("architectures") if config.is_file() else None
    if not architectures or architectures[0] not in supported_architectures():
        return None
    if config.parent == result:
        return "python llama.cpp/convert_hf_to_gguf.py this/folder --outfile model.gguf"
    if not _is_plain_lora(result):
        return None
    base_option = f"--base {shlex.quote(base_name)} " if Path(base_name).is_absolute() else ""
    return f"python llama.cpp/convert_lora_to_gguf.py {base_option}this/folder --outfile adapter.gguf"


def _is_plain_lora(adapter: Path) -> bool:
    """Whether convert_lora_to_gguf.py can read the adapter: two matrices per layer, scaled by alpha / rank.

    As of llama.cpp 0b03adaa, the script fails on any other tensor, and ignores rsLoRA's scale of alpha /
    sqrt(rank).
    """
    path = adapter / "adapter_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    unsupported = ("use_dora", "use_rslora", "modules_to_save", "target_parameters")
    return values.get("peft_type") == "LORA" and not any(values.get(name) for name in unsupported)
