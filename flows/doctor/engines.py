"""Which engines would train here: their packages are there, and what a rank imports can be imported."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from estimator import models
from flows.doctor.line import Line
from launchers import checks, engines
from launchers.imports import collector_paused
from launchers.settings import build

# What the ranks of each engine import (its ``train``)
MODULES = {
    "torchtune": ("launchers.engines.torchtune.recipe",),
    "deepspeed": ("launchers.engines.deepspeed.sharding", "launchers.engines.loop.train"),
    "fsdp2": ("launchers.engines.fsdp2.sharding", "launchers.engines.loop.train"),
    "trl": ("launchers.engines.trl.trainer",),
}
_MODEL = "tiny-llama"


def engine(name: str) -> list[Line]:
    """One line; what is optional in its extra is said on the extra's line."""
    checks.check_installed(name)
    task = "grpo" if name == "trl" else "sft"
    reason = engines.get(name).unsupported(build({"engine": name, "task": task}), models.find(_MODEL))
    if reason is not None:
        return [Line(check=name, state="no", found=reason)]
    with collector_paused():
        for module in MODULES[name]:
            import_module(module)
    return [Line(check=name, state="ok", found=f"{_version(name)} can be imported; tasks {_tasks(name)}")]


def _version(name: str) -> str:
    package = "torch" if name == "fsdp2" else name
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package


def _tasks(name: str) -> str:
    return "grpo alone" if name == "trl" else "but grpo"
