"""A step as seen by a mutator, without a flow."""

from __future__ import annotations

from typing import Any

from decorators._metaflow import Backend, UserValue


class RecordedStep:
    """The view of a step for a mutator, stored in a dict."""

    def __init__(
        self, backend: Backend, *, parallel: bool = True, written: tuple[str, ...] = (), **values: Any
    ) -> None:
        self.name = "train"
        self._given = {name: UserValue(value=values[name], by="@kubernetes in the flow") for name in written}
        self._backend = backend
        self.set: dict[str, dict[str, Any]] = {backend: values, **({"parallel": {}} if parallel else {})}

    def backend(self) -> Backend:
        return self._backend

    def values(self, decorator: str) -> dict[str, Any]:
        return self.set.get(decorator, {})

    def user_values(self, decorator: str) -> dict[str, UserValue]:
        return self._given if decorator == self._backend else {}

    def has(self, decorator: str) -> bool:
        return decorator in self.set

    def set_values(self, decorator: str, values: dict[str, Any]) -> None:
        self.set.setdefault(decorator, {}).update(values)

    def add_environment(self, variables: dict[str, str]) -> None:
        existing_variables = self.values("environment").get("vars") or {}
        self.set_values("environment", {"vars": {**existing_variables, **variables}})

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the step without those of Metaflow."""
        variables = self.values("environment").get("vars") or {}
        return {name: value for name, value in variables.items() if not name.startswith("METAFLOW_")}
