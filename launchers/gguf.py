"""GGUF, the form of llama.cpp: the command that makes it of a finished model, where one is known to."""

from __future__ import annotations

import csv
import json
import shlex
from functools import cache
from pathlib import Path

_TABLE = Path(__file__).with_name("data") / "gguf.csv"


@cache
def known() -> frozenset[str]:
    """Architectures (of config.json) that llama.cpp's converters take."""
    with _TABLE.open(newline="") as file:
        return frozenset(row["architecture"] for row in csv.DictReader(file))


def command(result: Path, base: Path, base_name: str) -> str | None:
    """What converts a model's or adapter's folder, written ``this/folder``; None where nothing is known to.

    ``base`` holds the configuration of the model that was fine-tuned, ``base_name`` is a folder or a Hugging
    Face id.
    """
    config = result / "config.json" if (result / "config.json").is_file() else base / "config.json"
    architectures = json.loads(config.read_text()).get("architectures") if config.is_file() else None
    if not architectures or architectures[0] not in known():
        return None
    if config.parent == result:
        return "python llama.cpp/convert_hf_to_gguf.py this/folder --outfile model.gguf"
    if not _is_plain_lora(result):
        return None
    where = f"--base {shlex.quote(base_name)} " if Path(base_name).is_absolute() else ""
    return f"python llama.cpp/convert_lora_to_gguf.py {where}this/folder --outfile adapter.gguf"


def _is_plain_lora(adapter: Path) -> bool:
    """Whether the adapter is what convert_lora_to_gguf.py reads: two matrices for a layer, by alpha / rank.

    Of llama.cpp 0b03adaa: it ends with an error at any other tensor, and writes alpha without rsLoRA's root.
    """
    path = adapter / "adapter_config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    more = ("use_dora", "use_rslora", "modules_to_save", "target_parameters")
    return values.get("peft_type") == "LORA" and not any(values.get(name) for name in more)
