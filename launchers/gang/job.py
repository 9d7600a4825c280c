"""TrainJob: all that the processes of one node need to know, as one file in the node's work folder.

The work folder of a node::

    job.json            this job
    engine/             what the engine generated from it (recipe YAML, DeepSpeed JSON)
    telemetry/          rank-00000.jsonl, one file a rank (launchers.report.telemetry)
    logs/               standard output and error of every rank
    ranks/              rank-00000.json, a rank's pid; rank-00000.done, when it has trained to the end
    errors/             rank-00000.json {"rank", "at", "message", "traceback"}, written by a failing rank
    checkpoints/        step-00000010/ and in it, when a rank has finished its part, rank-00000.json
    profile/            rank-00000.trace.json.gz, and of a GPU rank-00000.memory.pickle: a profiled window
    output/             what the engine saved at the end
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from estimator.models import ModelRef
from estimator.plan import Plan
from launchers.report.evaluations import HeldOutLoss
from launchers.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    plan: Plan
    settings: RunConfig
    model: ModelRef  # what is fine-tuned, as it was looked up where the run was launched
    model_dir: Path  # its files, in Hugging Face layout: config.json, *.safetensors, tokenizer
    data_dir: Path  # launchers.dataset.prepared
    work_dir: Path
    total_steps: int  # of the whole run
    start_step: int = 0  # steps already done in the checkpoint
    resume_dir: Path | None = None  # that checkpoint's files, the union of all nodes' parts
    reference: Path | None = None  # launchers.reference's file, or launchers.latents' folder, if needed
    reward: str | None = None  # what scores answers, on this machine: file.py:name, module:name or a folder
    keeps_result: bool = True  # whether the trained model is written at the end; a trial's isn't
    held_out_reference: Path | None = None  # as `reference`, of the rows that are evaluated while it trains
    evaluations: tuple[HeldOutLoss, ...] = ()  # up to start_step
    exports_only: bool = False  # whether the checkpoint of start_step is written as the result, untrained

    def save(self) -> Path:
        """Write job.json into the work folder and return its path."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("plan", "settings", "model")
        }
        values = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
        values["evaluations"] = [each.to_dict() for each in self.evaluations]
        values |= {"plan": self.plan.to_dict(), "settings": self.settings.model_dump(mode="json")}
        values["model"] = self.model.to_dict()
        self.work_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "job.json"
        path.write_text(json.dumps(values, indent=1))
        return path

    @classmethod
    def load(cls, path: Path) -> TrainJob:
        values = json.loads(path.read_text())
        paths = {
            name: Path(values.pop(name))
            for name in ("model_dir", "data_dir", "work_dir", "resume_dir", "reference", "held_out_reference")
            if values.get(name)
        }
        plan = Plan.from_json(json.dumps(values.pop("plan")))
        settings = RunConfig.model_validate(values.pop("settings"))
        model = ModelRef.from_dict(values.pop("model"))
        evaluations = tuple(HeldOutLoss(**each) for each in values.pop("evaluations"))
        return cls(plan=plan, settings=settings, model=model, evaluations=evaluations, **(values | paths))

    @property
    def checkpoint_every(self) -> int:
        """Optimizer steps between checkpoints; 0: none but the result."""
        return self.settings.checkpoint_every

    @property
    def evaluates(self) -> bool:
        """Whether the loss on the held-out rows is measured while it trains."""
        return self.settings.evaluation.in_training and self.keeps_result and not self.exports_only

    @property
    def held_out_dir(self) -> Path:
        """The held-out rows, a prepared folder; there only where rows are held out."""
        return self.data_dir / "heldout"

    @property
    def base_model(self) -> str:
        """What adapters are told that they belong to, as PEFT can find it: a Hugging Face id, or a folder."""
        if self.model.kind == "folder":
            return self.model.location
        if self.model.kind == "stored":  # a folder of the launching machine, which its name is
            return self.model.name
        return self.model.hub_id or str(self.model_dir)

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
    def profile_dir(self) -> Path:
        return self.work_dir / "profile"

    @property
    def output_dir(self) -> Path:
        return self.work_dir / "output"

    def checkpoint_dir(self, step: int) -> Path:
        return self.checkpoints_dir / f"step-{step:08d}"
