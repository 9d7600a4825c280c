"""Names of this package for ``from metaflow import ...``: Metaflow copies every name here except modules."""

from importlib.metadata import PackageNotFoundError, version

from metaflow_extensions.finetune.lazily import current_profile, gpu_profile, load_model

__mf_extensions__ = "finetune"  # together with __version__ part of the version tag of runs
try:
    __version__ = version("metaflow-finetune")
except PackageNotFoundError:  # a task's code package
    __version__ = "packaged"
del PackageNotFoundError, version
__all__ = ["current_profile", "gpu_profile", "load_model"]
