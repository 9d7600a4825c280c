"""Garbage collection is paused while large packages are imported."""

from __future__ import annotations

import gc
from importlib import import_module

import pytest

from launchers.base.imports import collector_paused


def test_the_collector_is_paused_and_resumed_even_if_an_import_fails() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), collector_paused():
        import_module("no_such_module")
    assert gc.isenabled()


def test_a_collector_that_was_already_stopped_stays_stopped() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
