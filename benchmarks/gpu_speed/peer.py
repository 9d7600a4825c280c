"""Run another project's trainer once: ``python -m benchmarks.gpu_speed.peer ORDER PARENT_PID``.

Order and outcome have the format of :mod:`benchmarks.on_gpu.one_run`. Every row has the full sequence
length, so peers need neither padding nor a mask. Activation checkpointing is off if the run fits without it.
Settings are those that each peer's documentation recommends for speed, without kernels that are downloaded:
transformers 5.23 (perf_train_gpu_one, torch_compile), accelerate 1.15 (usage_guides/compilation), TRL 1.16
(reducing_memory_usage, liger_kernel_integration) and torchtune 0.6.1's configurations.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_speed.cases import COMPILED, TRL, TUNE
from benchmarks.gpu_speed.tune import PARENT
from benchmarks.on_gpu.one_run import Order, Outcome, execute
from estimator import models
from launchers.run_config import resolve
from launchers.settings import build

LOOK_S = 0.5
WORKERS = 2  # that collate batches
_FIGURE = re.compile(r"(\w+):(\S+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Training run of a peer, as stored in the ``settings`` of its order."""

    engine: str
    model: str  # name of the model table
    model_dir: str
    dataset: str
    method: str
    device: str
    seq_len: int
    micro_batch_size: int
    accumulation: int
    steps: int
    warm_up: int
    recomputes: bool = False  # activation checkpointing of torchtune, where it is planned to be needed

    @property
    def trainer(self) -> str:
        """Name without the suffix of compiled runs."""
        return self.engine.removesuffix(COMPILED)

    @property
    def compiles(self) -> bool:
        """Whether transformers' Trainer or TRL runs with torch_compile."""
        return self.engine != self.trainer

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.micro_batch_size * self.accumulation

    @property
    def rows(self) -> int:
        return self.micro_batch_size * self.accumulation * self.steps


def run(peer: Peer, folder: Path) -> Outcome:
    """Train; out of memory is an outcome, and so is a missing package."""
    package = {TRL: "trl", TUNE: "torchtune"}.get(peer.trainer, "transformers")
    needed = (package, "peft", *(("bitsandbytes",) if peer.method == "qlora" and peer.engine != TUNE else ()))
    for name in needed:
        if importlib.util.find_spec(name) is None:
            return Outcome(ended="refused", message=f"the package {name} is not installed")
    if peer.engine == TUNE:
        outcome = _tune(peer, folder)
        if outcome.ended != "out of memory" or peer.recomputes:
            return outcome
        return _tune(dataclasses.replace(peer, recomputes=True), folder)
    import torch

    if peer.compiles:  # block by block, which accelerate recommends for its start and calls equally fast
        os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"

    try:
        return _train(peer, folder, checkpointing=False)
    except torch.cuda.OutOfMemoryError:
        pass  # outside of the handler the first attempt's tensors can be freed
    torch.cuda.empty_cache()
    try:
        return _train(peer, folder, checkpointing=True)
    except torch.cuda.OutOfMemoryError as error:
        return Outcome(ended="out of memory", message=str(error)[:200])


def _train(peer: Peer, folder: Path, *, checkpointing: bool) -> Outcome:
    """Run transformers' Trainer or TRL's SFTTrainer."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    cuda = peer.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    liger = cuda and importlib.util.find_spec("liger_kernel") is not None
    options: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": peer.steps,
        "per_device_train_batch_size": peer.micro_batch_size,
        "gradient_accumulation_steps": peer.accumulation,
        "learning_rate": 1e-5,
        "bf16": cuda,
        "use_cpu": not cuda,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": checkpointing,
        "use_liger_kernel": liger,
        "logging_steps": peer.steps,
        "save_strategy": "no",
        "report_to": [],
        "dataloader_pin_memory": cuda,
        "dataloader_num_workers": WORKERS,
        "torch_compile": peer.compiles,
        "disable_tqdm": True,
    }
    if peer.compiles and not cuda:  # a rehearsal traces the model and generates no code, which takes minutes
        options["torch_compile_backend"] = "eager"
    if checkpointing:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    network, adapters = _network(peer)
    if peer.trainer == TRL:
        from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

        trainer: Any = SFTTrainer(
            model=network,
            args=SFTConfig(**options, max_length=peer.seq_len, packing=True, packing_strategy="wrapped"),
            train_dataset=_dataset(peer, labels=False),
            processing_class=_tokenizer(peer),
            peft_config=adapters,
            callbacks=[Clock()],
        )
    else:
        if adapters is not None:
            from peft import get_peft_model, prepare_model_for_kbit_training

            if peer.method == "qlora":
                network = prepare_model_for_kbit_training(network, use_gradient_checkpointing=checkpointing)
            network = get_peft_model(network, adapters)
            if checkpointing:
                network.enable_input_require_grads()
        trainer = Trainer(
            model=network,
            args=TrainingArguments(**options),
            train_dataset=_dataset(peer, labels=True),
            callbacks=[Clock()],
        )
    trainer.train()
    seconds = statistics.median(
        b - a for a, b in zip(times[peer.warm_up - 1 :], times[peer.warm_up :], strict=False)
    )
    return Outcome(
        ended="ran",
        steps=len(times),
        step_seconds=seconds,
        tokens_per_second=peer.tokens_per_step / seconds,
        live_bytes=torch.cuda.max_memory_allocated() if cuda else None,
        reserved_bytes=torch.cuda.max_memory_reserved() if cuda else None,
        notes=(
            f"activation checkpointing {'on' if checkpointing else 'off'}",
            f"Liger kernels {'on' if liger else 'off'}",
            f"torch.compile {'on' if peer.compiles else 'off'}",
        ),
    )


def _network(peer: Peer) -> tuple[Any, Any]:
    """Build the model in 16 bits (fp32 on a CPU), and PEFT's configuration of its adapters."""
    import torch
    from transformers import AutoModelForCausalLM

    cuda = peer.device == "cuda"
    options: dict[str, Any] = {
        "dtype": torch.bfloat16 if cuda else torch.float32,
        "attn_implementation": "sdpa",
    }
    if cuda:
        options["device_map"] = {"": 0}
    if peer.method == "qlora":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=options["dtype"],
        )
    network = AutoModelForCausalLM.from_pretrained(peer.model_dir, **options)
    network.config.use_cache = False
    if peer.method == "full":
        return network, None
    from peft import LoraConfig

    lora = _config(peer).lora
    targets = list(models.PROJECTIONS)
    return network, LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM"
    )


def _config(peer: Peer) -> Any:
    spec = models.find(peer.model)
    settings = build({"method": peer.method, "engine": "torchtune", "seq_len": peer.seq_len})
    return resolve(settings, spec, method=peer.method, engine="torchtune")


def _dataset(peer: Peer, *, labels: bool) -> Any:
    """Build rows of random tokens of the full length."""
    import numpy as np
    from datasets import Dataset

    draw = np.random.default_rng(0)
    vocabulary = models.find(peer.model).vocab
    tokens = draw.integers(10, vocabulary - 10, (peer.rows, peer.seq_len)).tolist()
    columns = {"input_ids": tokens, **({"labels": tokens} if labels else {})}
    return Dataset.from_dict(columns)


def _tokenizer(peer: Peer) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(peer.model_dir)


def _tune(peer: Peer, folder: Path) -> Outcome:
    """Run ``tune run`` and read its log; it is ended after its last step, before it saves."""
    config = folder / "tune.yaml"
    config.write_text(yaml.safe_dump(_recipe_config(peer, folder)))
    shutil.rmtree(folder / "tune-logs", ignore_errors=True)  # of an attempt that ran out of memory
    recipe = "full_finetune_single_device" if peer.method == "full" else "lora_finetune_single_device"
    command = [sys.executable, "-m", "benchmarks.gpu_speed.tune", "run", recipe, "--config", str(config)]
    output = folder / "tune.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and len(_logged(folder)) < peer.steps:
                time.sleep(LOOK_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    steps = _logged(folder)
    if len(steps) < peer.steps:
        text = output.read_text(errors="replace")
        message = " ".join(text.split())[-300:]
        return Outcome(ended="out of memory" if "OutOfMemoryError" in text else "failed", message=message)
    rate = statistics.median(step["tokens_per_second_per_gpu"] for step in steps[peer.warm_up :])
    peaks = [int(step["peak_memory_alloc"] * 2**30) for step in steps if "peak_memory_alloc" in step]
    reserved = [int(s["peak_memory_reserved"] * 2**30) for s in steps if "peak_memory_reserved" in s]
    return Outcome(
        ended="ran",
        steps=len(steps),
        step_seconds=peer.tokens_per_step / rate,
        tokens_per_second=rate,
        live_bytes=max(peaks, default=0) or None,
        reserved_bytes=max(reserved, default=0) or None,
        notes=(
            "packed by its own datasets, flex attention",
            f"activation checkpointing {'on' if peer.recomputes else 'off'}",
            f"torch.compile {'on' if peer.device == 'cuda' else 'off'}",
        ),
    )


def _logged(folder: Path) -> list[dict[str, float]]:
    """Read the figures of each step from torchtune's DiskLogger."""
    lines = [
        line
        for path in (folder / "tune-logs").glob("*.txt")
        for line in path.read_text().splitlines()
        if "tokens_per_second_per_gpu" in line
    ]
    return [{name: float(value) for name, value in _FIGURE.findall(line)} for line in lines]


def _recipe_config(peer: Peer, folder: Path) -> dict[str, Any]:
    """Build torchtune's published single-device configuration for the model, with packing and compile on."""
    from launchers.engines.torchtune.config import model_component, weight_files

    cuda = peer.device == "cuda"
    model_dir = Path(peer.model_dir)
    config = _config(peer)
    values: dict[str, Any] = {
        "output_dir": str(folder / "tune"),
        "seed": 0,
        "shuffle": False,
        "device": peer.device,
        "dtype": "bf16" if cuda else "fp32",
        "model": model_component(models.find(peer.model), config),
        "tokenizer": {
            "_component_": "benchmarks.gpu_speed.tune.tokenizer",
            "folder": peer.model_dir,
            "max_seq_len": peer.seq_len,
        },
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset",
            "source": "json",
            "data_files": peer.dataset,
            "column": "text",
            "split": "train",
            "packed": True,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(model_dir),
            "checkpoint_files": weight_files(model_dir),
            "recipe_checkpoint": None,
            "output_dir": str(folder / "tune"),
            "model_type": "LLAMA3",
        },
        "resume_from_checkpoint": False,
        "save_adapter_weights_only": False,
        "batch_size": peer.micro_batch_size,
        "epochs": 1,
        "max_steps_per_epoch": peer.steps,
        "gradient_accumulation_steps": peer.accumulation,
        "optimizer_in_bwd": False,
        "clip_grad_norm": None,
        "compile": cuda,
        "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 1e-5},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "enable_activation_checkpointing": peer.recomputes,
        "enable_activation_offloading": False,
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder / "tune-logs"),
        },
        "log_every_n_steps": 1,
        "log_peak_memory_stats": cuda,
        "profiler": {"_component_": "torchtune.training.setup_torch_profiler", "enabled": False},
    }
    return values


def measure(order: Order) -> Outcome:
    """Run the trainer of an order; the duration includes loading."""
    start = time.monotonic()
    outcome = run(Peer(**order.settings), order.folder)
    return dataclasses.replace(outcome, seconds=time.monotonic() - start)


if __name__ == "__main__":
    execute(measure, __doc__)
