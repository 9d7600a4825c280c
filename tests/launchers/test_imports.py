"""The collector while large packages are imported."""

from __future__ import annotations

import gc
from importlib import import_module

import pytest

from launchers.imports import collector_paused, take_flags_for_numbers


def test_the_collector_rests_and_goes_on_even_after_an_import_that_fails() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), collector_paused():
        import_module("no_such_module")
    assert gc.isenabled()


def test_a_collector_that_somebody_has_stopped_stays_so() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_flag_is_taken_where_transformers_declares_a_number_and_nothing_else_is() -> None:
    """The published config.json of OLMo 2 has tie_word_embeddings: false."""
    from transformers import Olmo2Config

    take_flags_for_numbers()
    take_flags_for_numbers()
    assert Olmo2Config(tie_word_embeddings=False).tie_word_embeddings is False
    with pytest.raises(Exception, match="hidden_size"):
        Olmo2Config(hidden_size="wide")
