"""Options shared by ``finetune plan``, ``run`` and ``estimate``, with their group and help text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

from typer import Option

from estimator import vocabulary

_DATA, _METHOD, _TRAINING, _WHERE, _OUTPUT = ("Model and data", "Method", "Training", "Where", "Output")


@dataclass(frozen=True, kw_only=True, slots=True)
class CommonOption:
    """Group and help of an option. ``unset``: text in place of a default value."""

    group: str
    text: str
    metavar: str = ""
    unset: str = ""
    choices: tuple[str, ...] = ()

    @property
    def help(self) -> str:
        """Return the help text, with the values of a closed set."""
        return f"{self.text}: {', '.join(self.choices)}" if self.choices else self.text


COMMON: dict[str, CommonOption] = {
    "model": CommonOption(
        group=_DATA, metavar="MODEL", text="Model name, Hugging Face id, folder or s3:// path"
    ),
    "dataset": CommonOption(group=_DATA, metavar="DATA", text="File, folder, Hugging Face id or s3:// path"),
    "task": CommonOption(
        group=_DATA, metavar="TASK", text="Training task", choices=tuple(get_args(vocabulary.Task))
    ),
    "seq_len": CommonOption(
        group=_DATA, metavar="N", text="Tokens per sequence", unset="2048 or model limit"
    ),
    "method": CommonOption(
        group=_METHOD,
        metavar="METHOD",
        text="Training method",
        choices=tuple(get_args(vocabulary.RequestedMethod)),
    ),
    "engine": CommonOption(
        group=_METHOD,
        metavar="ENGINE",
        text="Training engine",
        choices=(*vocabulary.LAUNCHED_ENGINES, "auto"),
    ),
    "lora_rank": CommonOption(group=_METHOD, metavar="N", text="Rank of the LoRA matrices", unset="8"),
    "lora_alpha": CommonOption(group=_METHOD, metavar="N", text="LoRA scale: alpha / rank", unset="2 x rank"),
    "quantization": CommonOption(
        group=_METHOD,
        metavar="FORMAT",
        text="Frozen weights of qlora",
        choices=tuple(get_args(vocabulary.LaunchedQuantization)),
        unset="nf4-double",
    ),
    "epochs": CommonOption(group=_TRAINING, metavar="N", text="Passes over the data", unset="1"),
    "max_steps": CommonOption(group=_TRAINING, metavar="N", text="Stop after this many optimizer steps"),
    "tokens": CommonOption(group=_TRAINING, metavar="N", text="Training tokens, such as 250M or 1.5B"),
    "lr": CommonOption(
        group=_TRAINING, metavar="RATE", text="Peak learning rate", unset="by method and model"
    ),
    "global_batch_size": CommonOption(
        group=_TRAINING, metavar="N", text="Sequences per step over all GPUs", unset="about 16"
    ),
    "micro_batch_size": CommonOption(
        group=_TRAINING, metavar="N", text="Sequences per GPU and pass", unset="largest fit"
    ),
    "optimizer": CommonOption(
        group=_TRAINING, metavar="NAME", text="Optimizer", choices=tuple(vocabulary.LAUNCHED_OPTIMIZERS)
    ),
    "precision": CommonOption(
        group=_TRAINING,
        metavar="TYPE",
        text="Training precision",
        choices=tuple(get_args(vocabulary.RequestedPrecision)),
    ),
    "activation_checkpointing": CommonOption(
        group=_TRAINING, text="Recompute activations", unset="if memory needs it"
    ),
    "packing": CommonOption(group=_TRAINING, text="Pack short samples", unset="on GPUs where tested"),
    "gpu": CommonOption(group=_WHERE, metavar="GPU", text="GPU model, by a name from `finetune gpus`"),
    "gpus": CommonOption(group=_WHERE, metavar="N", text="GPUs per node", unset="as planned"),
    "nodes": CommonOption(group=_WHERE, metavar="N", text="Number of nodes", unset="as planned"),
    "instance_type": CommonOption(group=_WHERE, metavar="TYPE", text="Instance type, such as p5.48xlarge"),
    "cloud": CommonOption(group=_WHERE, metavar="CLOUD", text="Cloud provider, such as aws"),
    "spot": CommonOption(group=_WHERE, text="Use spot instances, at spot prices"),
    "with": CommonOption(group=_WHERE, metavar="BACKEND", text="Run on kubernetes or batch", unset="here"),
    "device": CommonOption(group=_WHERE, metavar="DEVICE", text="Training device: auto, cuda, cpu"),
    "queue": CommonOption(group=_WHERE, metavar="QUEUE", text="AWS Batch job queue, or Kueue LocalQueue"),
    "output_dir": CommonOption(group=_OUTPUT, metavar="DIR", text="Folder for the trained model"),
    "push": CommonOption(
        group=_OUTPUT, metavar="REPO", text="Upload the model to this Hugging Face repository"
    ),
    "checkpoint_every": CommonOption(
        group=_OUTPUT, metavar="N", text="Steps between checkpoints", unset="a tenth of all"
    ),
    "eval_every": CommonOption(
        group=_OUTPUT, metavar="N", text="Steps between evaluations", unset="at the end"
    ),
    "tracker": CommonOption(
        group=_OUTPUT, metavar="NAME", text="Experiment tracker: tensorboard, wandb, mlflow"
    ),
    "plan_only": CommonOption(group=_OUTPUT, text="Print the plan and exit"),
    "verbose": CommonOption(group=_OUTPUT, text="Also print memory by category, reasons, all plans"),
}


def option(group: str, text: str, *declarations: str, unset: str = "") -> Any:
    """Build a typer option of a group of the help page. ``unset``: text in place of a default value."""
    return Option(*declarations, help=_with_default(text, unset), rich_help_panel=group)


def common(name: str, *declarations: str, choices: Iterable[str] | None = None, unset: str = "") -> Any:
    """Build a typer option with the group and text of COMMON.

    ``choices`` replaces its set of values, ``unset`` the text in place of a default value.
    """
    option = COMMON[name]
    values = option.choices if choices is None else tuple(choices)
    text = _with_default(f"{option.text}: {', '.join(values)}" if values else option.text, unset)

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return Option(
        *declarations, help=text, rich_help_panel=option.group, autocompletion=complete if values else None
    )


def _with_default(text: str, default: str) -> str:
    return f"{text.rstrip('.')} [default: {default}]" if default else text
