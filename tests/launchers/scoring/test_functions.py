"""References to scoring functions, and errors for missing ones."""

from __future__ import annotations

import pytest

from estimator.errors import UserError
from launchers.scoring import functions


def test_missing_files_and_modules_are_named() -> None:
    with pytest.raises(UserError, match=r"there is no file nothing\.py"):
        functions.load_function("nothing.py:f", "nothing.py:f")
    with pytest.raises(UserError, match="cannot be imported: ModuleNotFoundError"):
        functions.load_function("no_such_module:f", "no_such_module:f")


def test_a_scorer_with_a_colon_is_a_function_and_any_other_a_model() -> None:
    assert functions.scorer_of("a/b.py:f").file == "a/b.py"
    assert functions.scorer_of("package.module:f").module == "package.module"
    for model in ("org/name", "s3://bucket/model", "./folder", "/folder/model", "llama-8b"):
        assert functions.scorer_of(model).function is None, model
