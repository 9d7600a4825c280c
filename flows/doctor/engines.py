"""Engines that would train here: their packages are installed and a rank's imports work."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from estimator import models
from estimator.errors import UserError
from estimator.exact.torchtune_imports import torchtune_imports
from estimator.vocabulary import ENGINES
from flows.doctor.installed import US
from flows.doctor.line import Line
from launchers import engines
from launchers.base.imports import collector_paused
from launchers.run import checks
from launchers.run.job import unsupported
from launchers.settings import build

_MODEL = "tiny-llama"


def engines_of(*names: str) -> list[Line]:
    """Check engines in one process, as importing torch and transformers once for each would take longer."""
    return [_engine(name) for name in names]


def _engine(name: str) -> Line:
    """Check one engine. Optional packages of its extra are reported on the extra's line."""
    try:
        checks.check_installed(name)
    except UserError as error:
        return Line(check=name, state="no", found=error.problem, fix=error.advice)
    needs, tasks = engines.needs(name), ENGINES[name].tasks
    reason = unsupported(name, build({"engine": name, "task": tasks[0]}), models.find(_MODEL))
    if reason is not None:
        return Line(check=name, state="no", found=reason)
    try:
        with collector_paused(), torchtune_imports() if name == "torchtune" else nullcontext():
            for module in (*needs.packages, *needs.modules):
                import_module(module)
    except Exception as error:  # noqa: BLE001 - releases that do not go together fail in any way
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = f"pip install '{US}[{needs.extra}]'; docs/pins.md lists compatible releases"
        return Line(check=name, state="no", found=f"import failed: {message}", fix=fix)
    limitation = f", for task {tasks[0]} only" if len(tasks) == 1 else ""
    found = f"{_version(needs.distribution)} can be imported{limitation}"
    return Line(check=name, state="ok", found=found)


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
