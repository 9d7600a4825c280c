"""A small GRPO job: tiny-llama, a few prompts, and a reward that can be learned in some steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from launchers.dataset import prepare, prompts, render
from launchers.dataset.prepared import PROMPTS
from launchers.gang.job import TrainJob
from launchers.models import tiny_llama
from launchers.scoring.functions import load_function
from launchers.settings import Settings
from tests.launchers.engines.loop import runs

GROUP, ANSWERS, LENGTH = 8, 16, 6
LEARNT = 0.1  # by which the mean reward rises in 30 steps
REWARD = """
def vowels(prompt, answer):
    return sum(answer.count(letter) for letter in "aeiou") / max(1, len(answer))
"""


def make(folder: Path) -> None:
    """The model and the function that all jobs share."""
    tiny_llama.make(folder / "model")
    (folder / "toy.py").write_text(REWARD)


def job(
    folder: Path,
    name: str,
    method: str,
    *,
    world: int,
    steps: int,
    of: int | None = None,
    answers: int = ANSWERS,
    **overrides: Any,
) -> TrainJob:
    """A job of ``steps`` steps with so many answers in each, of a run of ``of``.

    Its data are those of all such runs.
    """
    values = {
        "task": "grpo",
        "method": method,
        "engine": "trl",
        "seq_len": 64,
        "max_steps": of or steps,
        "epochs": 100,
        "global_batch_size": answers,
        "optimizer": {"lr": 4e-3 if method == "full" else 1e-2},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "rl": {
            "reward": str(folder / "toy.py") + ":vowels",
            "group_size": GROUP,
            "max_completion_length": LENGTH,
            **overrides.pop("rl", {}),
        },
        "lora": {"rank": 16, "alpha": 32},
    }
    settings = Settings.model_validate(values)
    data = folder / f"data-{of or steps}-{answers}"
    if not data.is_dir():
        rows = [prompts.parse({"prompt": f"Say something about number {number}."}) for number in range(16)]
        prepare.prepare(rows, folder / "model", settings, 64, data)
    return runs.make_job(
        folder / name,
        folder / "model",
        data,
        steps=steps,
        world=world,
        micro=answers // world // world,  # one forward pass of one process, two of each of two
        accumulation=world,
        engine="trl",
        sharding="ddp" if world > 1 else "none",
        settings=values,
        reward=settings.rl.reward,
        **overrides,
    )


def mean_reward(model: Any, job: TrainJob) -> float:
    """Of answers that a transformers model draws to the job's prompts, the same each time."""
    tokenizer = render.load_tokenizer(job.model_dir, job.settings)
    reward = load_function(job.reward or "", "vowels")
    rewards_request = prompts.read_written(job.data_dir / PROMPTS)
    torch.manual_seed(0)
    prompts_read = []
    for prompt in rewards_request:
        ids = tokenizer(prompt.text, add_special_tokens=False, return_tensors="pt").input_ids
        options = {"do_sample": True, "top_k": 0, "max_new_tokens": LENGTH, "num_return_sequences": GROUP}
        with torch.inference_mode():
            drawn = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        texts = tokenizer.batch_decode(drawn[:, ids.shape[1] :], skip_special_tokens=True)
        prompts_read += [reward(prompt.shown, text) for text in texts]
    return sum(prompts_read) / len(prompts_read)
