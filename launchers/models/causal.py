"""Language models as transformers builds them: one way in, for training, its checks and the evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launchers.imports import collector_paused, take_flags_for_numbers


def configuration(folder: Path) -> Any:
    """The model's configuration, with the attention that computes what it says."""
    with collector_paused():
        from transformers import AutoConfig

    take_flags_for_numbers()
    config = AutoConfig.from_pretrained(folder)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        # Gemma 2: torch's own attention has no cap, and transformers 5.4 drops it there without a word
        config._attn_implementation = "eager"
    return config


def load(folder: Path, **options: Any) -> Any:
    """The model with its weights; ``options`` are from_pretrained's."""
    config = configuration(folder)
    with collector_paused():
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(folder, config=config, **options)  # imports its code
