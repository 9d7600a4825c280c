"""One rank of GRPO: TRL's trainer, with our data, optimizer, telemetry and checkpoints.

The rows of a step follow the prepared order, so that a resumed run continues with the next prompts. Folders
saved by the trainer become the node's part of a checkpoint unchanged.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from launchers.dataset import prompts, render
from launchers.dataset.prepared import PROMPTS, Prepared
from launchers.dataset.prompts import Prompt
from launchers.engines import _merge
from launchers.engines.loop import export, generators, optimizer
from launchers.engines.loop.model import low_rank_config
from launchers.engines.loop.optimizer import schedule
from launchers.engines.profiling import Profiler
from launchers.engines.waiting import Waiting
from launchers.gang.job import TrainJob
from launchers.gang.leaving import Cadence
from launchers.gang.rank import RankEnv, RankReporter, mark_part_complete
from launchers.models import causal
from launchers.report.telemetry import Step
from launchers.report.trace import GENERATION
from launchers.scoring.rewards import rewards_of

# TRL's name -> our name of each reported figure
FIGURES = {
    "reward": "reward",
    "reward_std": "reward_std",
    "kl": "kl",
    "entropy": "entropy",
    "completions/mean_length": "answer_tokens",
    "completions/clipped_ratio": "answers_cut",
    "frac_reward_zero_std": "groups_alike",
}


def train(job: TrainJob) -> None:
    """Train one rank, from the newest checkpoint or from the weights (see Engine.train)."""
    env = RankEnv.read()
    device = _start(job, env)
    _train(job, env, device)
    # DDP must be freed before its process group. If it had the last reference, it would hold the GIL while it
    # waits for gloo's threads, and these need the GIL to free the tensors of the last barrier (torch 2.13)
    gc.collect()
    dist.destroy_process_group()


def _train(job: TrainJob, env: RankEnv, device: torch.device) -> None:
    reporter = RankReporter(job.telemetry_dir, env)
    reporter.started(
        device=f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "cpu",
        backend=dist.get_backend(),
        engine="trl",
    )
    reporter.phase("load")
    generators.seed(job.settings.seed)  # adapters start equal on all ranks
    logging.getLogger("transformers").setLevel(logging.ERROR)
    trainer = _Trainer(job, env, reporter, device)
    if job.plan.adapters and job.settings.merges(job.plan.method) and env.rank == 0:
        export.check_mergeable(trainer.trained, job)
    reporter.phase("train", job.start_step)
    if job.start_step < job.total_steps:
        trainer.train(resume_from_checkpoint=str(job.resume_dir) if job.resume_dir else None)
    if job.keeps_result:
        reporter.phase("save", job.total_steps)
        export.save(_Finished(trainer.trained, device), job, env)
    dist.barrier()
    reporter.phase("done", job.total_steps)
    reporter.close()


def _start(job: TrainJob, env: RankEnv) -> torch.device:
    """Join the process group; accelerate uses the existing one."""
    cuda = job.plan.layout.device == "cuda"
    device = torch.device("cuda", env.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=_merge.LIMIT)
    return device


class _Finished:
    """The trained model for export.save. It is not sharded."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device

    def trained_state(self, _job: TrainJob) -> None:
        """Return None: rank 0's module holds the trained parameters."""


class _Trainer(GRPOTrainer):  # type: ignore[misc,unused-ignore]
    """TRL's trainer over prepared prompts."""

    def __init__(self, job: TrainJob, env: RankEnv, reporter: RankReporter, device: torch.device) -> None:
        self._job = job
        self._prompt_tokens = job.settings.seq_len - _answer_tokens(job)  # maximum length
        tokenizer = render.load_tokenizer(job.model_dir, job.settings)
        tokenizer.padding_side = "left"
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(render.pad_id_of(tokenizer))
        data = Prepared(job.data_dir)
        prompt_rows = prompts.read_prompts(job.data_dir / PROMPTS)
        order = [int(row) for row in data.order[: job.total_steps * data.info.global_batch_size]]
        model = causal.load(
            job.model_dir, trust_remote_code=job.settings.trust_remote_code, dtype=_dtype(job)
        )
        super().__init__(
            model=model,
            args=_config(job),
            reward_funcs=_reward_function(job, prompt_rows, device),
            train_dataset=Dataset.from_dict(
                {"prompt": [prompt_rows[row].text for row in order], "row": order}
            ),
            processing_class=tokenizer,
            peft_config=None if not job.plan.adapters else low_rank_config(model, job),
            callbacks=[_Listener(job, env, reporter, Waiting(device))],
        )
        self.remove_callback(PrinterCallback)
        if (
            env.world_size == 1
        ):  # accelerate wraps models for training in DDP, also in one process of torchrun
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self._window = Profiler(job, env, reporter, self.model)
        self.add_callback(_Watch(self._window))

    def _generate_and_score_completions(self, *arguments: Any, **options: Any) -> Any:
        with self._window.within(GENERATION):
            return super()._generate_and_score_completions(*arguments, **options)

    @property
    def trained(self) -> Any:
        """The model without accelerate's wrappers."""
        return self.accelerator.unwrap_model(self.model)

    def create_optimizer(self, *_: Any, **__: Any) -> torch.optim.Optimizer:
        if getattr(self, "optimizer", None) is None:
            trained = [
                (name, parameter)
                for name, parameter in self.model.named_parameters()
                if parameter.requires_grad
            ]
            self.optimizer: Any = optimizer.build(self._job, trained)[0]
        steps: torch.optim.Optimizer = self.optimizer
        return steps

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ARG002
        if getattr(self, "lr_scheduler", None) is None:
            self.lr_scheduler: Any = schedule(self._job)(optimizer or self.optimizer)
        return self.lr_scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load into host memory first: torch rejects "cpu:0", accelerate's device of ranks on CPUs."""
        if checkpoint is None:
            return
        for name, states in (("optimizer", self.optimizer), ("scheduler", self.lr_scheduler)):
            file = Path(checkpoint) / f"{name}.pt"
            states.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))

    def _tokenize_prompts(self, prompts: list[str]) -> tuple[list[list[int]], None, dict[str, Any]]:
        """Tokenize prompts, which already contain special tokens; cut off the start of long ones."""
        token_ids = self.processing_class(text=prompts, add_special_tokens=False, verbose=False)["input_ids"]
        return [ids[-self._prompt_tokens :] for ids in token_ids], None, {}


def _answer_tokens(job: TrainJob) -> int:
    return job.settings.rl.answer_tokens(job.settings.seq_len)


def _dtype(job: TrainJob) -> torch.dtype:
    """Return the type of the weights: fp32 for trained ones under autocast, 16 bits for a frozen base."""
    precision = job.plan.layout.precision
    full_precision = precision == "fp32" or (precision == "bf16-mixed" and not job.plan.adapters)
    return torch.float32 if full_precision else torch.bfloat16


def _config(job: TrainJob) -> GRPOConfig:
    settings, layout = job.settings, job.plan.layout
    values: dict[str, Any] = {
        "output_dir": str(_saved_folder(job)),
        "max_steps": job.total_steps,
        "per_device_train_batch_size": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.accumulation,
        "learning_rate": settings.optimizer.lr,
        "max_grad_norm": settings.clip_grad_norm or 0.0,
        "gradient_checkpointing": layout.activation_checkpointing,
        "bf16": layout.precision != "fp32",
        "use_cpu": layout.device == "cpu",
        "seed": settings.seed,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "steps" if job.checkpoint_every else "no",
        "save_steps": job.checkpoint_every or 500,
        "ddp_timeout": int(_merge.LIMIT.total_seconds()),
        "shuffle_dataset": False,  # the prepared order is shuffled already
        "num_generations": settings.rl.group_size,
        "max_completion_length": _answer_tokens(job),
        "temperature": settings.rl.temperature,
        "beta": settings.rl.beta_of(job.plan.method),
        "loss_type": settings.rl.loss,
        "disable_dropout": False,
    }
    return GRPOConfig(**(values | settings.engine_options))


def _saved_folder(job: TrainJob) -> Path:
    """Return the folder where the trainer writes its checkpoints, before they are moved."""
    return job.work_dir / "engine" / "trl"


def _reward_function(job: TrainJob, prompts: Sequence[Prompt], device: torch.device) -> Any:
    """Build the job's reward function as TRL calls it."""
    if job.reward is None:
        raise ValueError("grpo learns from rewards, and the job names none")
    reward_name = job.settings.rl.reward or job.reward
    rewards = rewards_of(job.reward, reward_name, str(device), bf16=job.plan.layout.precision != "fp32")

    def reward(completions: list[str], row: list[int], **_: Any) -> list[float]:
        return rewards([prompts[index] for index in row], completions)

    return reward


class _Watch(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Reports the trainer's steps to the profiler. Called after :class:`_Listener`, so it is not timed."""

    def __init__(self, window: Profiler) -> None:
        self._window = window

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._window.begin(state.global_step + 1)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._window.end()

    def on_log(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._window.save(state.global_step)


class _Listener(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Reports the trainer's steps as telemetry, and turns its saved folders into checkpoints."""

    def __init__(self, job: TrainJob, env: RankEnv, reporter: RankReporter, waiting: Waiting) -> None:
        self._job, self._env, self._reporter, self._waiting = job, env, reporter, waiting
        self._collective_seconds: float | None = None  # of the last step
        self._cadence = Cadence(job, env)
        self._step_start = self._step_seconds = self._lr = 0.0
        self._tokens = 0  # input tokens of all steps so far

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._tokens = state.num_input_tokens_seen

    def on_step_begin(self, *_: Any, **options: Any) -> None:
        self._waiting.begin()
        self._step_start, self._lr = time.perf_counter(), options["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        self._step_seconds, self._collective_seconds = (
            time.perf_counter() - self._step_start,
            self._waiting.seconds(),
        )
        control.should_save = self._cadence.writes_after(state.global_step)

    def on_log(self, _args: Any, state: Any, _control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "reward" not in logs:  # the summary at the end of the run
            return
        first = self._env.rank == 0
        tokens, self._tokens = state.num_input_tokens_seen - self._tokens, state.num_input_tokens_seen
        layout = self._job.plan.layout
        norm = logs.get("grad_norm")
        figures = {metric: logs[name] for name, metric in FIGURES.items() if logs.get(name) is not None}
        self._reporter.step(
            Step(
                rank=self._env.rank,
                step=state.global_step,
                loss=float(logs["loss"]) if first else None,
                metrics=figures if first else None,
                lr=self._lr,
                grad_norm=None if norm is None else float(norm),
                samples=layout.micro_batch_size * layout.accumulation,
                tokens=int(tokens) // self._env.world_size,
                all_tokens=int(tokens) if first else None,
                dt=self._step_seconds,
                dtf=None,
                dtb=None,
                in_collectives=self._collective_seconds,
            )
        )

    def on_save(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Move the folder saved by all ranks to this node's part of the checkpoint."""
        step = state.global_step
        self._reporter.phase("checkpoint", step)
        dist.barrier()
        folder = self._job.checkpoint_dir(step)
        if self._env.local_rank == 0:
            folder.parent.mkdir(parents=True, exist_ok=True)
            (_saved_folder(self._job) / f"checkpoint-{step}").rename(folder)
        dist.barrier()
        mark_part_complete(folder, self._env, step)
        self._cadence.finish(step)
        self._reporter.phase("train", step)
