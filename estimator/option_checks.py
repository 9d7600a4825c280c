"""Checks of values that users set. Messages name the option and its value, as on the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import NoneType

from estimator.errors import UserError
from estimator.names import unknown_choice
from estimator.option_names import option_name

LONGEST_SHOWN = 40  # characters of a value that messages repeat


def check_choice(setting: str, value: object, choices: Iterable[object]) -> None:
    """Raise UserError that lists the choices for a value that is none of them."""
    choices = tuple(choices)
    if value not in choices:
        raise unknown_choice(f"{option_name(setting)} {_shown(value)}", value, map(str, choices))


def check_count(setting: str, value: object, least: int = 1) -> None:
    """Raise UserError for a value that is not a whole number of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        _refuse(setting, value, "a whole number above 0" if least == 1 else f"a whole number from {least}")


def check_above_zero(setting: str, value: object, unit: str) -> None:
    """Raise UserError for a value that is not a finite number above 0. ``unit``: what it is, for advice."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (math.isfinite(value) and value > 0):  # type: ignore[arg-type, operator]
        _refuse(setting, value, "a number above 0", f"Give {unit}, or remove it.")


def check_type(label: str, value: object, kind: type | tuple[type, ...], advice: str) -> None:
    """Raise UserError for a value of another type, from callers without a type checker."""
    if isinstance(value, kind):
        return
    kinds = [each for each in (kind if isinstance(kind, tuple) else (kind,)) if each is not NoneType]
    shown = f" = {value!r}" if value is not None and len(repr(value)) <= LONGEST_SHOWN else ""
    name = type(value).__name__
    found = "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    raise UserError(f"{label}{shown} is {found}, not a {' or '.join(k.__name__ for k in kinds)}.", advice)


def check_names(label: str, value: object) -> None:
    """Raise UserError unless a value is a tuple or list of names; text would be taken for its letters."""
    check_type(label, value, (tuple, list), f'Write {label}=("first", "second"), or ("first",) for one.')


def _refuse(setting: str, value: object, rule: str, advice: str = "Correct it, or remove it.") -> None:
    raise UserError(f"{option_name(setting)} {_shown(value)} must be {rule}.", advice)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else repr(value)
