"""Every judge says what its rule is, which limits it has and from where, and what it can't tell."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from checklist.analysis.busbw import OPS
from checklist.checks import CHECKS, LOCALS
from checklist.judges.thresholds import PAIR, table
from checklist.verdict import JUDGES

ROWS = sorted({row.op for row in table().rows})


def test_every_check_has_a_judge() -> None:
    assert JUDGES.keys() == CHECKS.keys()


@pytest.mark.parametrize("check", JUDGES)
def test_a_judge_states_its_rule_its_limits_and_what_it_can_not_tell(check: str) -> None:
    text = inspect.getdoc(JUDGES[check]) or ""
    rule, _, rest = text.partition("\n\nLimits: ")
    assert "FAIL" in rule or "WARN" in rule
    assert "\n\nCan't tell: " in rest


@pytest.mark.parametrize("check", JUDGES)
def test_a_judge_names_the_limits_that_its_code_uses(check: str) -> None:
    text = inspect.getdoc(JUDGES[check]) or ""
    missing = [name for name in limits_of(JUDGES[check]) if f"``{name}``" not in text]
    assert not missing, f"{JUDGES[check].__module__}.{JUDGES[check].__name__} uses {missing}"


def test_the_limits_of_a_judge_s_helpers_count_as_its_own() -> None:
    assert {"PEERS", "OUTLIER", "PEERS_WARN", "PEERS_FAIL"} <= limits_of(JUDGES["gemm"])
    assert limits_of(JUDGES["clock"]) == {"SKEW_WARN_S", "SKEW_FAIL_S"}
    assert limits_of(JUDGES["ranks"]) == set()


@pytest.mark.parametrize("op", ROWS)
def test_the_judge_of_a_row_of_the_table_names_it_or_its_kind(op: str) -> None:
    check = "pairs" if op == PAIR else "bandwidth" if op in OPS else LOCALS[op].check
    text = inspect.getdoc(JUDGES[check]) or ""
    assert "thresholds.csv" in text
    assert f"``{op}``" in text


@pytest.mark.parametrize("check", JUDGES)
def test_a_judge_that_looks_into_the_past_names_the_past_s_limits(check: str) -> None:
    looks = any(".past(" in inspect.getsource(function) for function in code_of(JUDGES[check]))
    text = inspect.getdoc(JUDGES[check]) or ""
    assert looks == ("``WARN_SHARE`` and" in text and "baseline.py" in " ".join(text.split()))


def code_of(judge: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The judge and all functions of its module that it calls, and they in turn."""
    module, functions, left = sys.modules[judge.__module__], [], [judge]
    while left:
        function = left.pop()
        functions.append(function)
        for name in names_in(function):
            other = getattr(module, name, None)
            mine = inspect.isfunction(other) and other.__module__ == module.__name__
            if mine and other not in functions and other not in left:
                left.append(other)
    return functions


def names_in(function: Callable[..., Any]) -> set[str]:
    tree = ast.parse(inspect.getsource(function))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def limits_of(judge: Callable[..., Any]) -> set[str]:
    """Public constants of numbers (and of tuples and texts that are compared with) that its code uses."""
    module = sys.modules[judge.__module__]
    used = {name for function in code_of(judge) for name in names_in(function)}
    return {name for name in used if _is_limit(module, name)}


def _is_limit(module: ModuleType, name: str) -> bool:
    value = getattr(module, name, None)
    return name.isupper() and not name.startswith("_") and isinstance(value, int | float)
