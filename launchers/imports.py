"""Import torch, transformers and similar packages in a sixth less time and without their log messages."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager


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
