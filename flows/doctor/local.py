"""The default job on this machine: the checks before a run, without the run."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path

from estimator.formatting import format_count
from flows.doctor.line import Line
from launchers import settings
from launchers.base import workdir


def default_job() -> list[Line]:
    """Plan the default job like the flow, which checks model, memory, packages and disk. Raises UserError."""
    from flows.finetune import planning  # imports Metaflow, which may be what is broken

    values = {"settings": settings.parse_yaml(""), "no_calibration": True}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        plan = planning.plan_from_parameters(values, "local")
    work_dir = workdir.root()
    why_not = not_writable(work_dir)
    if why_not:
        found = f"work folder {work_dir}: {why_not}"
        return [Line(check="local", state="no", found=found, fix=workdir.PLACE_ADVICE)]
    gpus = plan.layout.processes_per_node if plan.layout.device == "cuda" else 0
    found = (
        f"{plan.model}, {plan.method} with {plan.engine} on {format_count(gpus, 'GPU') if gpus else 'CPUs'}"
    )
    return [Line(check="local", state="ok", found=found, needs=(plan.engine, "datastore", "metadata"))]


def not_writable(folder: Path) -> str:
    """Return why no file can be written in a folder, or its parent if it is missing; empty if one can."""
    folder = folder.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"finetune doctor")
    except OSError as error:
        return error.strerror or str(error)
    return ""
