"""Preference tasks compared with trainers of TRL on the same rows on every sharding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from launchers.dataset import prepared
from launchers.dataset.batches import collate_pairs
from launchers.engines.loop.model import made_trainable, pretrained
from launchers.engines.loop.tasks import Preferences, answers_of, chosen_cross_entropy
from launchers.gang.job import TrainJob
from launchers.settings import Settings
from tests.launchers.engines.loop import runs

STEPS, BATCH = 10, 4
SHARDINGS = {
    "deepspeed-2": ("deepspeed", "zero2"),
    "deepspeed-3": ("deepspeed", "zero3"),
    "fsdp2": ("fsdp2", "fsdp"),
}
TASKS = [(task, method) for task in ("dpo", "orpo", "simpo", "kto", "reward") for method in ("lora", "full")]
# One task of pairs, one of single answers, one with a head of its own; the others run every night.
EVERY_CHANGE = [("dpo", "lora"), ("kto", "full"), ("reward", "lora")]
RATES = {"lora": 1e-2, "full": 1e-3}


def settings_of(task: str, method: str) -> dict[str, Any]:
    return {
        "task": task,
        "method": method,
        "optimizer": {"lr": RATES[method]},
        "schedule": {"name": "linear", "warmup_steps": 2},
    }


def make_job(folder: Path, task: str, method: str, sharding: str = "fsdp2", **options: Any) -> TrainJob:
    model, data = folder / "model", folder / "data"
    if not model.exists():
        runs.make_model(model, "rewards" if task == "reward" else "llama")
        rows = runs.judged(12) if task == "kto" else runs.pairs(12)
        runs.make_data(data, rows, batch=BATCH, steps=STEPS)
    engine, states = SHARDINGS[sharding]
    values = {"engine": engine, "sharding": states, "settings": settings_of(task, method)} | options
    job = runs.make_job(folder / f"{sharding}-{task}-{method}", model, data, steps=STEPS, **values)
    return runs.with_reference(job, folder)


def losses_of_trl(job: TrainJob, work: Path) -> tuple[list[float], list[float]]:
    """Return loss and margin of each step from the trainer of TRL, before the step."""
    pytest.importorskip("trl", reason="trl needs Python 3.11 and is not installed")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    word_ids = {f"w{number}": number for number in range(1, runs.END)} | {"<pad>": 0, "</s>": runs.END}
    plain = Tokenizer(models.WordLevel(word_ids, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>", pad_token="<pad>")

    def text(tokens: Any) -> str:
        return " ".join("</s>" if token == runs.END else f"w{token}" for token in tokens)

    data, task = prepared.Prepared(job.data_dir), job.settings.task
    rows: list[dict[str, Any]] = []
    for number in data.order:
        if task == "kto":
            row = data.row(int(number))
            prompt = int((row.labels == prepared.IGNORE).sum())
            rows.append(
                {
                    "prompt": text(row.tokens[:prompt].tolist()),
                    "completion": f" {text(row.tokens[prompt:].tolist())}",
                    "label": row.desirable,
                }
            )
            continue
        chosen, rejected = data.row(int(number)).documents()
        if task == "reward":
            tokens = {"chosen_ids": chosen.tokens.tolist(), "rejected_ids": rejected.tokens.tolist()}
            rows.append(dict[str, Any](tokens))
            continue
        prompt = int((chosen.labels == prepared.IGNORE).sum())
        answers = {"chosen": chosen, "rejected": rejected}
        texts = {name: f" {text(row.tokens[prompt:].tolist())}" for name, row in answers.items()}
        rows.append({"prompt": text(chosen.tokens[:prompt].tolist()), **texts})
    common = {
        "output_dir": str(work),
        "use_cpu": True,
        "bf16": False,
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": job.settings.optimizer.lr,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "max_length": 128,
    }
    kinds = {
        "dpo": (DPOTrainer, DPOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
        "simpo": (CPOTrainer, CPOConfig),
        "kto": (KTOTrainer, KTOConfig),
        "reward": (RewardTrainer, RewardConfig),
    }
    trainer_class, config_class = kinds[task]
    trl_options = {"simpo": {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0, "beta": 2.0}}
    losses: list[float] = []

    class Recorded(trainer_class):  # type: ignore[valid-type,misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    network = made_trainable(pretrained(job, dtype=torch.float32, device=torch.device("cpu")), job)
    if job.settings.method == "full":
        network.warnings_issued = {}
    trainer = Recorded(
        model=network,
        args=config_class(**common, **trl_options.get(task, {})),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    name = "margin" if task == "reward" else "rewards/margins"
    return losses, [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "method"),
    [pytest.param(*each, marks=[] if each in EVERY_CHANGE else pytest.mark.nightly) for each in TASKS],
)
def test_a_task_has_the_losses_of_trl_with_every_sharding(tmp_path: Path, task: str, method: str) -> None:
    steps = {name: runs.run(make_job(tmp_path, task, method, name)) for name in SHARDINGS}
    expected, expected_margins = losses_of_trl(make_job(tmp_path, task, method), tmp_path / "trl")
    assert len(expected) == STEPS
    assert expected[-1] < expected[0]
    for step_losses in steps.values():
        assert runs.losses(step_losses) == pytest.approx(expected, rel=1e-4)
        margins = [(step.metrics or {})["reward_margin"] for step in step_losses]
        # TRL logs figures to a few digits
        assert margins == pytest.approx(expected_margins, rel=1e-2, abs=2e-3)


@pytest.mark.parametrize("task", ["dpo", "orpo", "simpo"])
def test_the_loss_of_a_task_equals_a_value_calculated_by_hand(task: str) -> None:
    """Two pairs; vocabulary of 4; token probabilities 1/2, 1/4, 1/8, 1/8."""
    rows = [_pair([0, 1], [0, 2]), _pair([1, 1, 0], [2])]
    batch = collate_pairs(rows, 0)
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.125])
    logits = probabilities.log().expand(*batch.labels.shape, 4)
    answers = answers_of(logits, batch)
    half = math.log(2)
    assert answers.chosen.tolist() == pytest.approx([-3 * half, -5 * half])
    assert answers.rejected.tolist() == pytest.approx([-4 * half, -3 * half])
    chosen_mean, rejected_mean = [-1.5 * half, -5 / 3 * half], [-2 * half, -3 * half]
    preferences = Preferences(Settings.model_validate({"task": task}))
    losses, rewards = preferences.losses(answers, answers if task == "dpo" else None)
    if task == "dpo":
        assert losses.tolist() == pytest.approx([half, half])
        assert rewards.sums()["accuracy"].item() == 1.0  # two ties
        return
    assert rewards.sums()["accuracy"].item() == 2.0
    for loss, better, worse in zip(losses.tolist(), chosen_mean, rejected_mean, strict=True):
        if task == "simpo":
            ahead = 2 * (better - worse) - 1
            assert loss == pytest.approx(math.log1p(math.exp(-ahead)))
        else:
            odds = [math.exp(value) / (1 - math.exp(value)) for value in (better, worse)]
            assert loss == pytest.approx(0.1 * math.log1p(odds[1] / odds[0]))
    # prompts of one token (3), then the chosen answers: 2 + 3 predicted tokens
    assert chosen_cross_entropy(logits, batch).item() == pytest.approx(8 * half)


def _pair(chosen: list[int], rejected: list[int]) -> prepared.Row:
    parts = []
    for answer in (chosen, rejected):
        tokens = torch.tensor([3, *answer], dtype=torch.int32).numpy()
        labels = tokens.copy()
        labels[0] = prepared.IGNORE
        lengths = torch.tensor([len(tokens)], dtype=torch.int32).numpy()
        parts.append(prepared.Row(tokens=tokens, labels=labels, lengths=lengths))
    return runs.joined(parts)


def test_label_smoothing_mixes_in_the_loss_of_the_swapped_pair() -> None:
    answers = answers_of(torch.zeros(2, 3, 4), collate_pairs([_pair([0, 1], [2])], 0))
    smoothed = Preferences(Settings.model_validate({"task": "simpo", "preference": {"label_smoothing": 0.2}}))
    losses, _ = smoothed.losses(answers, None)
    ahead = -1.0  # equal rewards, less the margin
    expected = 0.8 * math.log1p(math.exp(-ahead)) + 0.2 * math.log1p(math.exp(ahead))
    assert losses.item() == pytest.approx(expected)


def test_dpo_without_a_reference_is_a_programming_error() -> None:
    answers = answers_of(torch.zeros(2, 3, 4), collate_pairs([_pair([0, 1], [2])], 0))
    with pytest.raises(ValueError, match="reference"):
        Preferences(Settings.model_validate({"task": "dpo"})).losses(answers, None)
