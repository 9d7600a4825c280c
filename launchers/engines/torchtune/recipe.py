"""Execution of torchtune's unmodified recipes, by a subclass of each recipe's class.

torchtune 0.6.1 is the last release. Its recipes save and resume only at the ends of epochs, and log only on
rank 0. The subclass overrides:

``setup``                after the recipe's own: initial adapters independent of the number of processes,
                         weights and optimizers from the checkpoint that the run resumes from, the step
                         counter, and the hooks that time forward and backward passes
``_setup_lr_scheduler``  the schedule of the whole run, started at the step that the run resumes from
``_setup_profiler``      the profiler's ``step``, which every rank calls after every optimizer step, writes
                         telemetry and checkpoints, evaluates held-out rows, and stops the run early
``train``                reports the phase and starts the clock
``_loss_step``           with an optimizer in the backward pass, gradients are those of the mean loss
``save_checkpoint``      adapters are merged shard by shard (``export``)
``_setup_data``          batches are copied to the GPU ahead of their use, and gradients of adapters reduced
                         once per step; the recipes of DPO have no profiler: the data loader reports the end
                         of a step
``cleanup``              the process group ends even if the recipe created none

The training loop, the model, the loss, the data loader and the final save of a whole model are the recipe's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import math
import resource
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from estimator.exact.torchtune_imports import torchtune_imports
from launchers.dataset.prepared import Prepared
from launchers.engines.loop.evaluation import Evaluator
from launchers.engines.neftune import EmbeddingNoise
from launchers.engines.profiling import Profiler
from launchers.engines.torchtune import checkpoint as torchtune_checkpoint
from launchers.engines.torchtune.clock import StepClock
from launchers.engines.torchtune.measured_model import MeasuredModel
from launchers.engines.waiting import Waiting
from launchers.gang.job import TrainJob
from launchers.gang.leaving import Cadence
from launchers.gang.rank import RankEnv, RankReporter, mark_part_complete
from launchers.report.telemetry import Step

with torchtune_imports():
    import torchtune.training
    from torchtune.modules.peft import get_lora_module_names

    from launchers.engines.torchtune import export as torchtune_export
    from launchers.engines.torchtune.loader import DeviceLoader, document_ids_copied_without_waiting

RECIPES = {
    "full_finetune_single_device": "FullFinetuneRecipeSingleDevice",
    "full_finetune_distributed": "FullFinetuneRecipeDistributed",
    "lora_finetune_single_device": "LoRAFinetuneRecipeSingleDevice",
    "lora_finetune_distributed": "LoRAFinetuneRecipeDistributed",
    "lora_dpo_single_device": "LoRADPORecipeSingleDevice",
    "lora_dpo_distributed": "LoRADPORecipeDistributed",
}
# recipes that do not create their process group
_WITHOUT_GROUP = ("lora_finetune_distributed", "lora_dpo_distributed")

if TYPE_CHECKING:

    class _Recipe:
        """Members of torchtune's recipe classes that this module uses."""

        global_step: int
        max_steps_per_epoch: int | None
        _device: torch.device
        _model: torch.nn.Module
        _optimizer: torch.optim.Optimizer
        _optimizer_in_bwd: bool
        _optim_ckpt_wrapper: Any
        _loss_fn: Any
        _metric_logger: Any
        _checkpointer: Any
        _dtype: torch.dtype
        _lora_rank: int
        _lora_alpha: float
        _lora_attn_modules: list[str]
        _apply_lora_to_mlp: bool
        _apply_lora_to_output: bool

        def __init__(self, cfg: Any) -> None: ...
        def setup(self, cfg: Any) -> None: ...
        def _setup_lr_scheduler(self, **arguments: Any) -> Any: ...
        def _setup_profiler(self, cfg_profiler: Any = None) -> Any: ...
        def _setup_data(self, *arguments: Any, **options: Any) -> Any: ...
        def _loss_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor: ...
        def train(self) -> None: ...
        def save_checkpoint(self, epoch: int) -> None: ...
        def cleanup(self) -> None: ...

else:
    _Recipe = object


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figures:
    """Metrics of a step on this rank; rank 0 reports the loss and the task's metrics."""

    loss: float | None
    grad_norm: float | None
    metrics: dict[str, float] | None = None


class Steps(_Recipe):
    """Mixin of a recipe class: telemetry and checkpoints at every step, and resuming from one."""

    def __init__(self, cfg: Any, job: TrainJob, env: RankEnv, reporter: RankReporter) -> None:
        self._job, self._env, self._reporter = job, env, reporter
        self._latest = _LatestValues(None)
        self._cadence = Cadence(job, env)
        super().__init__(cfg)

    def setup(self, cfg: Any) -> None:
        super().setup(cfg)
        self.global_step = self._reported_step = self._job.start_step
        if self._env.rank == 0:
            self._metric_logger = self._latest = _LatestValues(self._metric_logger)
        if self._job.resume_dir is None:
            draw_adapters(self._model, self._job.settings.seed)
        else:
            torchtune_checkpoint.load(self._job.resume_dir, self._model, self._optimizers)
            self._restore_generators_at_first_forward(self._job.resume_dir)
        self._window = Profiler(self._job, self._env, self._reporter, self._model)
        self._evaluator = Evaluator(self._job, self._env, self._reporter, self._model, self._cadence)
        self._measured_model = MeasuredModel(self._model, self._device)
        embedding, data = self._model.tok_embeddings, Prepared(self._job.data_dir)
        self._noise = EmbeddingNoise(embedding, self._job, self._env, data)
        self._clock = StepClock(self._device.type == "cuda", self._window.phase)
        self._clock.watch(self._model, self._optimizers)
        self._waiting = Waiting(self._device)
        self._model.register_forward_hook(lambda *_: self._batches.prepare())

    def _setup_data(self, *arguments: Any, **options: Any) -> Any:
        loaded = super()._setup_data(*arguments, **options)
        *sampler, loader = loaded if isinstance(loaded, tuple) else (loaded,)  # a sampler from DPO's recipes
        self._batches = DeviceLoader(
            loader, self._device, before=self._before_batch, is_last=self._is_last_batch
        )
        return (*sampler, self._batches) if sampler else self._batches

    def _before_batch(self, number: int) -> None:
        """Reduce gradients of adapters in a step's last pass only; they are small enough to stay whole."""
        accumulation = self._job.plan.layout.accumulation
        if accumulation > 1 and self._job.plan.adapters and isinstance(self._model, FSDPModule):
            self._model.set_requires_gradient_sync(number % accumulation == 0)

    def _is_last_batch(self) -> bool:
        return False  # the recipe ends by itself

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The recipe's optimizer, or the optimizers in the backward pass: one per parameter.

        The schedule belongs to the first.
        """
        if getattr(self, "_optimizer_in_bwd", False):  # an attribute that the LoRA recipes lack
            return list(self._optim_ckpt_wrapper.optim_map.values())
        return [self._optimizer]

    def _setup_lr_scheduler(self, **arguments: Any) -> Any:
        start = self._job.start_step
        if start:
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group.setdefault("initial_lr", group["lr"])
        arguments |= {"num_training_steps": self._job.total_steps, "last_epoch": start - 1}
        schedule = super()._setup_lr_scheduler(**arguments)
        for optimizer in self._optimizers[1:]:  # the recipe sets their rate only after the first step
            optimizer.param_groups[0]["lr"] = schedule.get_last_lr()[0]
        return schedule

    def _setup_profiler(self, cfg_profiler: Any = None) -> Any:
        return _CallbackProfiler(super()._setup_profiler(cfg_profiler), self._after_batch)

    def train(self) -> None:
        if self._job.exports_only:
            self._reporter.phase("save", self._job.start_step)
            self.save_checkpoint(epoch=0)
            return
        self._reporter.phase("train", self._job.start_step)
        self._begin()
        super().train()

    def _loss_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Compute the mean loss of a batch; divide its gradient by the labels for an optimizer in backward.

        Single-device recipes multiply the mean loss by the number of labels that count, and divide the
        gradients by it after the backward pass. With an optimizer in the backward pass, 0.6.1 omits the
        division, and a step's weight in the moments would grow with its tokens. Here the loss keeps its
        value, but its gradient is divided in advance.
        """
        if not getattr(self, "_optimizer_in_bwd", False):
            return super()._loss_step(batch)
        labels: torch.Tensor = (batch["labels"] != self._loss_fn.ignore_index).sum()
        loss = super()._loss_step(batch)
        value = loss.detach()
        return value + (loss - value) / labels

    def _after_batch(self) -> None:
        """Report and evaluate a finished step; single-device recipes call this after every micro batch."""
        step = self.global_step
        if step == self._reported_step:
            return
        self._reported_step = step
        self._report(step)
        self._window.save(step)
        self._evaluator.after(step, self._measured_model)
        if self._evaluator.is_kept(step):
            self._checkpoint(step)
        if self._evaluator.stops:
            self.max_steps_per_epoch = step - self._job.start_step  # the recipe then ends
        if self._is_finished and self._evaluator.is_exported(step):
            self._reporter.phase("save", step)
        self._begin()

    @property
    def _is_finished(self) -> bool:
        return self._evaluator.stops or self.global_step == self._job.total_steps

    def _begin(self) -> None:
        """Start the next step."""
        self._window.begin(self._reported_step + 1)
        self._noise.begin(self._reported_step + 1)
        self._waiting.begin()
        self._clock.restart()

    def _report(self, step: int) -> None:
        samples, tokens = self._batches.take_counts()
        figures = self._figures(step)
        times = self._clock.read()
        self._window.end()
        self._reporter.step(
            Step(
                rank=self._env.rank,
                step=step,
                loss=figures.loss,
                metrics=figures.metrics,
                lr=self._clock.lr,
                grad_norm=figures.grad_norm,
                samples=samples,
                tokens=tokens,
                dt=times.step,
                dtf=times.forward,
                dtb=times.backward,
                in_collectives=self._waiting.seconds(),
            )
        )

    def _figures(self, step: int) -> _Figures:
        logged = self._latest.of(step)
        return _Figures(loss=logged.get("loss"), grad_norm=logged.get("grad_norm"))

    def _checkpoint(self, step: int) -> None:
        self._reporter.phase("checkpoint", step)
        folder = self._job.checkpoint_dir(step)
        torchtune_checkpoint.save(folder, self._model, self._optimizers)
        mark_part_complete(folder, self._env, step)
        self._cadence.finish(step)
        self._reporter.phase("train", step)

    def _restore_generators_at_first_forward(self, folder: Path) -> None:
        """Restore the random generators late, as building model and data loader draws random numbers."""

        def restore(*_: Any) -> None:
            handle.remove()
            torchtune_checkpoint.load_generators(folder)

        handle = self._model.register_forward_pre_hook(restore)

    def save_checkpoint(self, epoch: int) -> None:
        if not self._evaluator.is_exported(self.global_step):
            return
        if not self._job.plan.adapters:
            super().save_checkpoint(epoch)
            return
        modules = get_lora_module_names(
            self._lora_attn_modules, self._apply_lora_to_mlp, self._apply_lora_to_output
        )
        rank, alpha = self._lora_rank, self._lora_alpha
        config = {"r": rank, "lora_alpha": alpha, "target_modules": modules, "peft_type": "LORA"}
        torchtune_export.save(
            self._model,
            torchtune_export.Adapters(rank=rank, alpha=alpha, config=config),
            self._checkpointer,
            model_dir=self._job.model_dir,
            output_dir=self._job.output_dir,
            merged=self._job.settings.merges(self._job.plan.method),
            dtype=self._dtype,
            device=self._device,
        )

    def cleanup(self) -> None:
        super().cleanup()
        if dist.is_initialized():
            dist.destroy_process_group()


def draw_adapters(model: torch.nn.Module, seed: int) -> None:
    """Draw LoRA's initial weights as torchtune does (Kaiming uniform), but full tensors from one seed.

    The recipes draw each shard with its rank's generator, so the initial adapters would depend on the number
    of processes.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not name.endswith("lora_a.weight"):
            continue
        full_tensor = torch.empty(parameter.shape, dtype=torch.float32)
        torch.nn.init.kaiming_uniform_(full_tensor, a=math.sqrt(5), generator=generator)
        values = full_tensor.to(device=parameter.device, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            values = distribute_tensor(values, parameter.device_mesh, parameter.placements)
        with torch.no_grad():
            parameter.copy_(values)


class PairSteps(Steps):
    """Steps of the DPO recipes, which neither clip gradients nor call a profiler."""

    def setup(self, cfg: Any) -> None:
        self._grad_norm = torch.zeros(())
        super().setup(cfg)
        self._optimizer.register_step_pre_hook(self._clip)

    def _is_last_batch(self) -> bool:
        self._after_batch()
        return self._is_finished

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        limit = self._job.settings.clip_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        self._grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _figures(self, step: int) -> _Figures:  # noqa: ARG002
        """Return means over the pairs of all ranks; 0.6.1 logs the sum of the ranks' losses."""
        sums = self._loss_fn.take_sums().cpu()
        if dist.is_initialized():
            dist.all_reduce(sums)
        _, loss, *metrics = (sums / sums[0]).tolist()
        grad_norm = float(self._grad_norm)
        if self._env.rank != 0:
            return _Figures(loss=None, grad_norm=grad_norm)
        names = self._loss_fn.metrics
        return _Figures(loss=loss, grad_norm=grad_norm, metrics=dict(zip(names, metrics, strict=True)))


class _CallbackProfiler:
    """A recipe's profiler that calls ``after_step`` after each ``step``."""

    def __init__(self, profiler: Any, after_step: Any) -> None:
        self._profiler, self._after_step = profiler, after_step

    def step(self) -> None:
        self._profiler.step()
        self._after_step()

    def start(self) -> None:
        self._profiler.start()

    def stop(self) -> None:
        self._profiler.stop()

    def __enter__(self) -> _CallbackProfiler:
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._profiler.__exit__(*error)


class _LatestValues:
    """A metric logger that keeps the newest step's values, and forwards all calls to another logger."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._step, self._values = -1, dict[str, float]()

    def log_dict(self, payload: Any, step: int) -> None:
        self._step, self._values = step, {key: float(value) for key, value in payload.items()}
        self._logger.log_dict(payload, step=step)

    def close(self) -> None:
        self._logger.close()

    def of(self, step: int) -> dict[str, float]:
        return self._values if step == self._step else {}


def run(job: TrainJob, env: RankEnv, reporter: RankReporter, name: str, values: dict[str, Any]) -> None:
    """Train with recipe ``name`` under configuration ``values``."""
    on_cpu = values["device"] == "cpu"
    # Recipes for one process have no group; torch warns of that when it writes or reads their checkpoints
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    recipe_class = getattr(_load(name), RECIPES[name])
    mixin = PairSteps if job.settings.trains_on_pairs else Steps
    steps: Any = type("Stepped" + RECIPES[name], (mixin, recipe_class), {})
    with _cpu_shims() if on_cpu else contextlib.nullcontext():
        if name in _WITHOUT_GROUP:  # the other recipes create it or need none
            if not on_cpu:
                torch.cuda.set_device(env.local_rank)
            dist.init_process_group("gloo" if on_cpu else "cuda:nccl,cpu:gloo")
        recipe = steps(OmegaConf.create(values), job, env, reporter)
        reporter.started(device=_device_name(recipe._device), backend=_backend(), engine="torchtune")
        recipe.setup(cfg=OmegaConf.create(values))
        with document_ids_copied_without_waiting(recipe._device):
            recipe.train()
        recipe.cleanup()
    reporter.phase("done", recipe.global_step)


def _load(name: str) -> ModuleType:
    """Load a recipe's module by its path, because the ``recipes`` package refuses to be imported."""
    origin = importlib.util.find_spec("torchtune")
    assert origin is not None  # noqa: S101
    assert origin.origin is not None  # noqa: S101
    path = Path(origin.origin).parent.parent / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"torchtune_recipe_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"torchtune's recipe {path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _cpu_shims() -> Iterator[None]:
    """Replace what 0.6.1's distributed recipes call without checking for a GPU.

    ``get_memory_stats`` raises on a CPU, ``cleanup_before_training`` calls torch.cpu.empty_cache, which
    doesn't exist, and ``log_memory_stats`` expects a GPU's figures.
    """

    def memory_stats(device: Any, reset_stats: bool = True) -> dict[str, float]:  # noqa: ARG001
        return {"peak_memory_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}

    shims: dict[str, Any] = {
        "get_memory_stats": memory_stats,
        "cleanup_before_training": gc.collect,
        "log_memory_stats": lambda *_, **__: None,
    }
    originals = {name: getattr(torchtune.training, name) for name in shims}
    for name, shim in shims.items():
        setattr(torchtune.training, name, shim)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torchtune.training, name, original)


def _backend() -> str:
    if not dist.is_initialized():
        return "none"
    return "nccl" if "nccl" in dist.get_backend() else "gloo"


def _device_name(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    return f"{device} {torch.cuda.get_device_name(device)}"
