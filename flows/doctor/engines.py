"""Which engines would train here: their packages are there, and what a rank imports can be imported."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from estimator import models
from estimator.exact.torchtune_imports import torchtune_imports
from flows.doctor.installed import US
from flows.doctor.line import Line
from launchers import checks, engines
from launchers.imports import collector_paused
from launchers.settings import build

# What the ranks of each engine import first (its ``train``); some of it imports the engine only later
MODULES = {
    "torchtune": ("launchers.engines.torchtune.recipe",),
    "deepspeed": ("launchers.engines.deepspeed.sharding", "launchers.engines.loop.train"),
    "fsdp2": ("launchers.engines.fsdp2.sharding", "launchers.engines.loop.train"),
    "trl": ("launchers.engines.trl.trainer",),
}
EXTRAS = {"torchtune": "torchtune", "deepspeed": "deepspeed", "fsdp2": "fsdp2", "trl": "rl"}
_MODEL = "tiny-llama"


def engine(name: str) -> list[Line]:
    """One line; what is optional in its extra is said on the extra's line."""
    checks.check_installed(name)
    task = "grpo" if name == "trl" else "sft"
    reason = engines.get(name).unsupported(build({"engine": name, "task": task}), models.find(_MODEL))
    if reason is not None:
        return [Line(check=name, state="no", found=reason)]
    try:
        with collector_paused(), torchtune_imports() if name == "torchtune" else nullcontext():
            for module in (*checks.PACKAGES[name], *MODULES[name]):
                import_module(module)
    except Exception as error:  # noqa: BLE001 - releases that don't go together fail in any way
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = f"pip install '{US}[{EXTRAS[name]}]'; docs/pins.md has the releases that go together"
        return [Line(check=name, state="no", found=f"can't be imported: {said}", fix=fix)]
    only = ", for task grpo alone" if name == "trl" else ""
    return [Line(check=name, state="ok", found=f"works: {_version(name)} can be imported{only}")]


def _version(name: str) -> str:
    package = "torch" if name == "fsdp2" else name
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
