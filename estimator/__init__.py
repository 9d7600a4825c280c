"""Predict memory, speed and price of a fine-tuning job, and plan where to run it.

Input: a :class:`Job` and a :class:`Target`. Output: a :class:`Plan`. Imports neither torch nor Metaflow.
"""

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
