"""Loading of a model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from estimator.untrusted import read_json_object
from launchers.base.imports import collector_paused

CONFIG = "tokenizer_config.json"


def tokenizer_in(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model's folder; nothing is downloaded.

    ``trust_remote_code``: run the folder's code if transformers has no class for the tokenizer.
    """
    with collector_paused():  # loading imports the model family's configuration and much of torch with it
        from transformers import AutoTokenizer

        trusted = trust_remote_code and needs_code(folder)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trusted)


def needs_code(folder: Path) -> bool:
    """Whether the tokenizer needs code of the folder, because transformers has no class for it."""
    values = read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not values.get("auto_map"):
        return False
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    name = str(values.get("tokenizer_class") or "").removesuffix("Fast")
    return all(tokenizer_class_from_name(candidate) is None for candidate in (name, f"{name}Fast"))
