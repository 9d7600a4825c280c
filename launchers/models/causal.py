"""Loading of transformers models for training, checks and evaluation.

It supports causal language models, vision-language models and reward models, distinguished by config.json.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launchers.base.imports import import_transformers, imported_quietly
from launchers.models import own_code, packed_masks

# Language models that transformers 5.23 supports only in AutoModelForImageTextToText
_OTHER_MAPPING = ("mistral4",)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars in the block."""
    with imported_quietly():
        from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def configuration(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Load the model's configuration, with an attention implementation that supports all of its options.

    ``trust_remote_code``: run the folder's code if transformers has no class for the model.
    """
    with imported_quietly():
        from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=runs_code(folder, trust_remote_code))
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        # Gemma 2: torch's attention does not support a soft cap, and transformers 5.4 then ignores it
        config._attn_implementation = "eager"
    return config


def runs_code(folder: Path, trust_remote_code: bool) -> bool:
    """Whether to run the folder's code: it is trusted, and transformers has no class for the model."""
    return trust_remote_code and own_code.needs_code(folder)


def load(folder: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Load the model with weights; ``options`` are passed to from_pretrained."""
    import_transformers()
    config = configuration(folder, trust_remote_code=trust_remote_code)
    trusted = runs_code(folder, trust_remote_code)
    with imported_quietly():
        kind = class_of(config)  # imports transformers' module of that family
        network = kind.from_pretrained(folder, config=config, trust_remote_code=trusted, **options)
    return packed_masks.separate_documents(network)


def build(folder: Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Build the model with random weights; ``options`` are passed to from_config."""
    import_transformers()
    config = configuration(folder, trust_remote_code=trust_remote_code)
    trusted = runs_code(folder, trust_remote_code)
    with imported_quietly():
        network = class_of(config).from_config(config, trust_remote_code=trusted, **options)
    return packed_masks.separate_documents(network)


def gives_rewards(config: Any) -> bool:
    """Whether the model outputs one score per text instead of next tokens."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def sees_images(config: Any) -> bool:
    """Whether the model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def class_of(config: Any, *, rewards: bool | None = None) -> Any:
    """Return transformers' auto class for the model.

    ``rewards``: whether the model must output a score per text; None: decided by config.json.
    """
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
    )

    if gives_rewards(config) if rewards is None else rewards:
        return AutoModelForSequenceClassification
    if sees_images(config) or config.model_type in _OTHER_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM
