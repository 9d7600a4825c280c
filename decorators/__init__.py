"""Integration with Metaflow: plans become resource requests, steps are measured, cards are drawn."""

from decorators._metaflow import FinetuneError, ensure_user, user_errors
from decorators.gpu_profile import current_plan, current_profile, gpu_profile
from decorators.profile.measured import GpuMeasured, Measured
from decorators.profiler import Profile
from decorators.storage import MetaflowStorage, datastore, fetch_model, origin_run_ids
from launchers.report.state import RankMeasured

METAFLOW_PACKAGE_POLICY = "include"  # the code package of a remote task contains this package

__all__ = [
    "FinetuneError",
    "GpuMeasured",
    "Measured",
    "MetaflowStorage",
    "Profile",
    "RankMeasured",
    "current_plan",
    "current_profile",
    "datastore",
    "ensure_user",
    "fetch_model",
    "gpu_profile",
    "origin_run_ids",
    "user_errors",
]
