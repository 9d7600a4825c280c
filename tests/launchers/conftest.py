"""Fixtures shared by all tests of launchers."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def one_tokenizer() -> Iterator[None]:
    """Train the tokenizer of tiny-llama, which takes seconds, once per test process."""
    from launchers.models import tiny_llama

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiny_llama, "_tokenizer", functools.cache(tiny_llama._tokenizer))
        yield
