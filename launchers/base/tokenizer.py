"""Loading of a model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launchers.base.imports import collector_paused


def tokenizer_in(folder: Path) -> Any:
    """Load the tokenizer of a model's folder; nothing is downloaded, and no code in the folder is run."""
    with collector_paused():
        from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
