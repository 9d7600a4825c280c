"""Models as transformers builds them: one way in, for training, its checks and the evaluation.

Language models, and those with one number for a whole text (reward models): config.json says which.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launchers.imports import collector_paused


def configuration(folder: Path) -> Any:
    """The model's configuration, with the attention that computes what it says."""
    with collector_paused():
        from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        # Gemma 2: torch's own attention has no cap, and transformers 5.4 drops it there without a word
        config._attn_implementation = "eager"
    return config


def load(folder: Path, **options: Any) -> Any:
    """The model with its weights; ``options`` are from_pretrained's."""
    config = configuration(folder)
    with collector_paused():
        return _class_of(config).from_pretrained(folder, config=config, **options)  # imports its code


def build(folder: Path, **options: Any) -> Any:
    """The model without its weights; ``options`` are from_config's."""
    config = configuration(folder)
    with collector_paused():
        return _class_of(config).from_config(config, **options)


def gives_rewards(config: Any) -> bool:
    """Whether a model has one number for a whole text, and none for a next token."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _class_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return AutoModelForSequenceClassification if gives_rewards(config) else AutoModelForCausalLM
