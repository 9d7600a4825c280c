"""Typed reads of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from estimator.errors import UserError


class ConfigReader:
    """Typed reads of a config.json; raises UserError, naming field, value and rule, for any other type."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self.config, self.name = config, name
        self.defaults: Mapping[str, Any] = {}  # for fields that are missing or null

    def get(self, field: str, default: Any = None) -> Any:
        """Return a field unchanged; if missing or null, the family's default, or else ``default``."""
        value = self.config.get(field)
        return self.defaults.get(field, default) if value is None else value

    def text(self, field: str) -> str:
        """Return a field that must be a string."""
        value = self.get(field)
        if not isinstance(value, str):
            raise self._error(field, value, "a name")
        return value

    def integer(self, *fields: str, default: int | None = None, least: int = 1) -> int:
        """Return the first existing one of these fields: a whole number of at least ``least``."""
        field = next((name for name in fields if self.get(name) is not None), fields[0])
        value = self.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            rule = "a whole number above 0" if least else "a whole number of at least 0"
            raise self._error(field, value, rule)
        return value

    def number(self, field: str, *, or_zero: bool = False) -> float | None:
        """Return a field that must be a number above 0, or at least 0; None where it is missing."""
        value: float | None = self.get(field)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or value < 0 or (value == 0 and not or_zero):
            raise self._error(field, value, "a number of at least 0" if or_zero else "a number above 0")
        return value

    def mapping(self, field: str) -> Mapping[str, Any]:
        """Return a field that must be an object; empty where it is missing."""
        value = self.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise self._error(field, value, "an object")
        return value or {}

    def items(self, field: str) -> list[Any]:
        """Return a field that must be a list; empty where it is missing."""
        value = self.get(field)
        if value is not None and not isinstance(value, list):
            raise self._error(field, value, "a list")
        return value or []

    def _error(self, field: str, value: object, rule: str) -> UserError:
        if field not in self.config:
            return UserError(f"Model {self.name}: config.json has no {field}.", f"It must be {rule}.")
        return UserError(f"Model {self.name}: config.json has {field} = {value!r}; it must be {rule}.")
