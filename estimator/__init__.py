"""Predict memory, speed and price of a fine-tuning job, and plan where to run it.

Input: a :class:`Job` and a :class:`Target`. Output: a :class:`Plan`. Imports neither torch nor Metaflow.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

# ruff: noqa: TC004 - _LazyPackage imports them
if TYPE_CHECKING:
    from estimator.errors import CannotFit, UserError
    from estimator.hardware import Gpu, Instance
    from estimator.job import Job, Machine, Target
    from estimator.models import ModelSpec
    from estimator.plan import Layout, MemoryEstimate, Override, Plan, Prediction, Request
    from estimator.planning.planner import plan
    from estimator.planning.report import render
    from estimator.planning.summary import render_cannot_fit

METAFLOW_PACKAGE_POLICY = "include"  # remote tasks receive the complete package, tables included

__all__ = [
    "CannotFit",
    "Gpu",
    "Instance",
    "Job",
    "Layout",
    "Machine",
    "MemoryEstimate",
    "ModelSpec",
    "Override",
    "Plan",
    "Prediction",
    "Request",
    "Target",
    "UserError",
    "plan",
    "render",
    "render_cannot_fit",
]

_MODULES = {
    "errors": ("CannotFit", "UserError"),
    "hardware": ("Gpu", "Instance"),
    "job": ("Job", "Machine", "Target"),
    "models": ("ModelSpec",),
    "plan": ("Layout", "MemoryEstimate", "Override", "Plan", "Prediction", "Request"),
    "planning.planner": ("plan",),
    "planning.report": ("render",),
    "planning.summary": ("render_cannot_fit",),
}  # imported when a name is used: a task with @gpu_profile needs no planner


class _LazyPackage(ModuleType):
    """This package. ``plan`` is the function, although there is a submodule of that name."""

    @property
    def plan(self) -> Any:
        return importlib.import_module("estimator.planning.planner").plan

    @plan.setter
    def plan(self, module: ModuleType) -> None:
        """Called by Python after the import of the submodule."""

    def __getattr__(self, name: str) -> Any:
        """Import a public name."""
        for module, names in _MODULES.items():
            if name in names:
                value = getattr(importlib.import_module(f"{self.__name__}.{module}"), name)
                setattr(self, name, value)
                return value
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _LazyPackage
