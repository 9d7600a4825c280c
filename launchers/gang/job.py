"""TrainJob: all that the processes of one node need to know, as one file in the node's work folder.

The work folder of a node::

    job.json            this job
    engine/             what the engine generated from it (recipe YAML, DeepSpeed JSON)
    telemetry/          rank-00000.jsonl, one file a rank (launchers.report.telemetry)
    logs/               standard output and error of every rank
    ranks/              rank-00000.json, a rank's pid; rank-00000.done, when it has trained to the end
    errors/             rank-00000.json {"rank", "at", "message", "traceback"}, written by a failing rank
    checkpoints/        step-00000010/ and in it, when a rank has finished its part, rank-00000.json
    output/             what the engine saved at the end
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from estimator.plan import Plan
from launchers.settings import Settings


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    plan: Plan
    settings: Settings  # with every `auto` that the engine reads already resolved
    model_dir: Path  # Hugging Face layout: config.json, *.safetensors, tokenizer
    data_dir: Path  # launchers.dataset.prepared
    work_dir: Path
    total_steps: int  # of the whole run
    checkpoint_every: int  # steps; 0: never
    start_step: int = 0  # steps already done in the checkpoint
    resume_dir: Path | None = None  # that checkpoint's files, the union of all nodes' parts

    def save(self) -> Path:
        """Write job.json into the work folder and return its path."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("plan", "settings")
        }
        values = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
        values |= {"plan": self.plan.to_dict(), "settings": self.settings.model_dump(mode="json")}
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "job.json"
        path.write_text(json.dumps(values, indent=1))
        return path

    @classmethod
    def load(cls, path: Path) -> TrainJob:
        values = json.loads(path.read_text())
        paths = {
            name: Path(values.pop(name))
            for name in ("model_dir", "data_dir", "work_dir", "resume_dir")
            if values.get(name)
        }
        plan = Plan.from_json(json.dumps(values.pop("plan")))
        settings = Settings.model_validate(values.pop("settings"))
        return cls(plan=plan, settings=settings, **(values | paths))

    @property
    def telemetry_dir(self) -> Path:
        return self.work_dir / "telemetry"

    @property
    def checkpoints_dir(self) -> Path:
        return self.work_dir / "checkpoints"

    @property
    def logs_dir(self) -> Path:
        return self.work_dir / "logs"

    @property
    def output_dir(self) -> Path:
        return self.work_dir / "output"

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints_dir / f"step-{step:08d}"
