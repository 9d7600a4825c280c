"""ScriptJob: a gang whose ranks run a user's own script, or a function of a file, instead of an engine."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pickle
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from estimator.errors import UserError
from estimator.vocabulary import Device
from launchers.gang.job import TrainJob, WorkFolder
from launchers.gang.rank import RankEnv, RankReporter
from launchers.report.telemetry import CHECKPOINTS_VARIABLE, TELEMETRY_VARIABLE


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """Number and device of a gang's processes."""

    nodes: int
    processes_per_node: int
    device: Device

    @property
    def world_size(self) -> int:
        """Processes of all nodes."""
        return self.nodes * self.processes_per_node


@dataclass(frozen=True, kw_only=True)
class ScriptJob(WorkFolder):
    """Job of one node.

    ``script`` runs as ``__main__`` with ``arguments`` behind its name. With ``function``, the function of
    that name in the file is called with the positional and keyword arguments that ``call`` holds (pickle).
    ``checkpoint_dir``: folder for the script's own checkpoints.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    function: str | None = None
    call: Path | None = None
    checkpoint_dir: Path | None = None
    work_dir: Path
    layout: Processes
    cores: int  # of this node
    hang_timeout_s: float
    gpu_type: str | None = None

    # A script configures CUDA's allocator, stores checkpoints and resumes by itself
    start_step: ClassVar = 0
    resume_dir: ClassVar[Path | None] = None
    exports_only: ClassVar = False
    expandable_segments: ClassVar = False
    keep_checkpoints: ClassVar = 2
    checkpoint_notes: ClassVar[dict[str, Any]] = {}
    reports_from_start: ClassVar = False

    def save(self) -> Path:
        """Write job.json into the work folder and return its path."""
        return self.write(dataclasses.asdict(self))

    @classmethod
    def load(cls, path: Path) -> ScriptJob:
        """Read a job from its file."""
        values = json.loads(path.read_text())
        values["layout"] = Processes(**values["layout"])
        values["arguments"] = tuple(values["arguments"])
        for name in ("script", "work_dir", "call", "checkpoint_dir"):
            values[name] = Path(values[name]) if values[name] is not None else None
        return cls(**values)

    def run(self) -> None:
        """Run the script or the function in this rank. Raises what it raises."""
        os.environ[TELEMETRY_VARIABLE] = str(self.telemetry_dir)
        if self.checkpoint_dir is not None:
            os.environ[CHECKPOINTS_VARIABLE] = str(self.checkpoint_dir)
        env = RankEnv.read()
        device = f"cuda:{env.local_rank}" if self.layout.device == "cuda" else "cpu"
        backend = "nccl" if self.layout.device == "cuda" else "gloo"
        RankReporter(self.telemetry_dir, env).started(device=device, backend=backend, engine="script")
        sys.path[0] = str(self.script.parent)
        sys.argv = [str(self.script), *self.arguments]
        try:
            if self.function is None:
                runpy.run_path(str(self.script), run_name="__main__")
            else:
                self._call(self.function)
        except SystemExit as error:
            if error.code not in (0, None):
                raise UserError(f"{self.script.name} ended with exit status {error.code}.") from error

    def _call(self, function: str) -> None:
        spec = importlib.util.spec_from_file_location(self.script.stem, self.script)
        if spec is None or spec.loader is None or self.call is None:
            raise UserError(f"{self.script} cannot be imported.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.script.stem] = module
        spec.loader.exec_module(module)
        arguments, keywords = pickle.loads(self.call.read_bytes())  # noqa: S301 - written by this run's task
        getattr(module, function)(*arguments, **keywords)


GangJob = TrainJob | ScriptJob
"""What a gang can run."""


def is_script(path: Path) -> bool:
    """Whether a job.json is one of a script."""
    return "script" in json.loads(path.read_text())


def values_of(*arguments: Any, **keywords: Any) -> bytes:
    """Serialize the arguments of a function's call, for :attr:`ScriptJob.call`."""
    return pickle.dumps((arguments, keywords))
