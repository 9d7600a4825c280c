"""Importing torch, transformers and the like: in a sixth less time, and so that they work together."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def collector_paused() -> Iterator[None]:
    """While it lasts, Python does not look for garbage.

    An import makes a million objects that stay, and has the collector go through them again and again:
    transformers' Llama takes 3.5 CPU seconds to import instead of 4.2 (transformers 5.4, torch 2.13, a core
    of two without a GPU).
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def imported_quietly() -> Iterator[None]:
    """While it lasts, libraries don't say what they would rather have been installed with.

    Of diffusers' pipelines, which import transformers' image processors (that want torchvision, of which
    nothing is used here), torchao and DeepSpeed.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # transformers sets the levels of its own loggers as it is imported
    try:
        with collector_paused():
            yield
    finally:
        logging.disable(before)


def take_flags_for_numbers() -> None:
    """Let configurations hold true and false in fields that transformers declares as whole numbers.

    transformers 5.4 declares OLMo's tie_word_embeddings so, Cohere 2's use_cache and some others, and
    huggingface_hub from 1.10 on refuses them then: their published config.json could not be read at all.
    """
    from huggingface_hub import dataclasses

    check = getattr(dataclasses, "_validate_simple_type", None)
    if check is None or check.__module__ == __name__:
        return

    def lenient(name: str, value: Any, expected_type: type) -> None:
        number = expected_type is int and isinstance(value, bool)
        check(name, int(value) if number else value, expected_type)

    dataclasses._validate_simple_type = lenient
