"""The runs of the speed benchmark, the most useful first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from estimator.errors import UserError
from estimator.vocabulary import METHODS, Device, LaunchedMethod, Task
from launchers.settings import Settings, build

Method = Literal["lora", "full", "qlora"]
FLOAT8 = "fsdp2 fp8"  # with fp8: rowwise, for methods without a quantized base
EAGER = "fsdp2 eager"  # without torch.compile
# With activation checkpointing: settings of section "recompute"
RECOMPUTED: dict[str, dict[str, Any]] = {
    "fsdp2 selective": {"what": "selective"},
    "fsdp2 recomputed": {"what": "full"},
    "fsdp2 half": {"what": "full", "every": 2},
}
OURS = ("fsdp2", FLOAT8, "torchtune", "deepspeed")
TRANSFORMERS, TRL, TUNE = "transformers Trainer", "TRL SFTTrainer", "torchtune CLI"
COMPILED = " compiled"  # suffix of a peer that runs with torch_compile, which its documentation calls faster
PEERS = (TRANSFORMERS, TRL, TUNE, TRANSFORMERS + COMPILED, TRL + COMPILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Size of the runs."""

    device: Device
    models: tuple[str, ...]  # names of the model table, the most useful first
    seq_lens: tuple[int, ...]
    tokens: int  # of a micro batch
    accumulation: int
    steps: int  # optimizer steps of a run
    warm_up: int  # first steps, excluded from the speed
    longest_run_s: float  # a run that lasts longer is ended
    one_sequence: bool = False  # micro batches of one sequence of any length, with activation checkpointing

    def micro_batch_size(self, seq_len: int) -> int:
        """Return the sequences of a micro batch."""
        return 1 if self.one_sequence else self.tokens // seq_len


ON_GPU = Scale(
    device="cuda",
    models=("llama-3.1-8b", "qwen3-1.7b"),
    seq_lens=(2048, 8192),
    tokens=8192,
    accumulation=2,
    steps=8,
    warm_up=3,
    longest_run_s=150.0,
)
TINY = Scale(
    device="cpu",
    models=("tiny-llama",),
    seq_lens=(64,),
    tokens=128,
    accumulation=2,
    steps=4,
    warm_up=1,
    longest_run_s=600.0,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is trained: the same for every engine and peer."""

    model: str
    method: LaunchedMethod
    seq_len: int
    task: Task = "pretrain"

    @property
    def name(self) -> str:
        """Name in tables and for ``--only``."""
        task = "" if self.task == "pretrain" else f" {self.task}"
        return f"{self.model} {self.method} {self.seq_len}{task}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One case with one engine of this package or one peer."""

    case: Case
    engine: str  # of OURS, PEERS or RECOMPUTED, or EAGER

    @property
    def name(self) -> str:
        """Name in tables and for ``--only``."""
        return f"{self.case.name}, {self.engine}"

    @property
    def is_peer(self) -> bool:
        """Whether another project's trainer runs the case."""
        return self.engine in PEERS


def compiles(engine: str) -> bool:
    """Return whether an engine or peer spends part of a run on torch.compile, on a GPU."""
    return engine not in (EAGER, TRANSFORMERS, TRL)


def in_order(scale: Scale) -> list[Run]:
    """List all runs by model and length: the first engine and the peers, then the other engines.

    The last is TRL's trainer compiled, which shares its training step with transformers' Trainer.
    """
    rounds = (
        (OURS[0], TRANSFORMERS, TRL),
        (TUNE, TRANSFORMERS + COMPILED),  # their compilation takes as long as two other peers' runs
        OURS[1:],
        (TRL + COMPILED,),
    )
    methods: tuple[LaunchedMethod, ...] = ("lora", "full", "qlora")
    return [
        Run(case=Case(model=model, method=method, seq_len=seq_len), engine=engine)
        for model, seq_len in product(scale.models, scale.seq_lens)
        for engines in rounds
        for method, engine in product(methods, engines)
        if engine != FLOAT8 or not METHODS[method].quantized
    ]


def chosen(runs: Iterable[Run], only: str | None) -> list[Run]:
    """Select the runs whose name has every word of ``only``; raises UserError where none has."""
    words = (only or "").split()
    every = list(runs)
    matches = [run for run in every if all(word in run.name.replace(",", "").split() for word in words)]
    if not matches:
        raise UserError(f"--only {only}: no run has all these words.", f"One run is: {every[0].name}")
    return matches


def settings_of(
    run: Run, scale: Scale, model_dir: Path, dataset: Path, profile: str | None = None
) -> Settings:
    """Build a user's settings for a run of this package, with defaults for its kernels.

    Packing is set because a batch size, here the one of the peers, turns its default off.
    """
    micro = scale.micro_batch_size(run.case.seq_len)
    engine = run.engine.split()[0]
    values: dict[str, Any] = {
        "model": str(model_dir),
        "method": run.case.method,
        "engine": engine,
        "fp8": "rowwise" if run.engine == FLOAT8 else "none",
        "dataset": str(dataset),
        "task": run.case.task,
        "seq_len": run.case.seq_len,
        "packing": run.case.task == "pretrain",
        "max_steps": scale.steps,
        "global_batch_size": micro * scale.accumulation,
        "micro_batch_size": micro,
        "checkpoint_every": scale.steps + 1,
        "evaluation": {"fraction": 0, "generations": 0},
        "resources": {"device": scale.device, "nodes": 1, "gpus": 1},
        "profile": {"steps": profile},
    }
    if scale.one_sequence or run.engine in RECOMPUTED:
        values["activation_checkpointing"] = True
        values["recompute"] = RECOMPUTED.get(run.engine, {})
    if run.case.task == "grpo":
        values["rl"] = {"reward": "benchmarks.gpu_speed.rewards:length", "group_size": micro}
    if run.engine == EAGER:
        values["compile"] = False
    if scale.device == "cuda" and run.case.method == "full" and engine == "fsdp2":
        values["precision"] = "bf16"  # as all peers train all weights
    return build(values)


def rows_needed(run: Run, scale: Scale) -> int:
    """Return the number of documents; their mean length is a third of the longest."""
    return 4 * scale.steps * scale.accumulation * scale.micro_batch_size(run.case.seq_len)
