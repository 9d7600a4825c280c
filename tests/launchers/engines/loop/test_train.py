"""The training loop compared with the transformers Trainer on the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launchers.dataset import prepared
from launchers.engines.loop.model import made_trainable, pretrained
from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs

pytestmark = pytest.mark.slow
STEPS, BATCH = 10, 4
ENGINES = {"deepspeed": "zero2", "fsdp2": "fsdp"}


def rows_in_order(job: TrainJob) -> Iterator[dict[str, list[int]]]:
    data = prepared.Prepared(job.data_dir)
    for number in data.order:
        row = data.row(int(number))
        yield {"input_ids": row.tokens.tolist(), "labels": row.labels.tolist()}


def losses_of_trainer(job: TrainJob, work: Path) -> list[float]:
    """Return the loss of each step from the transformers Trainer, before the step."""
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class Recorded(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    def collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, filler: int) -> torch.Tensor:
            return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

        return {"input_ids": padded("input_ids", 0), "labels": padded("labels", prepared.IGNORE)}

    arguments = TrainingArguments(
        output_dir=str(work),
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=1e-2,
        lr_scheduler_type="linear",
        warmup_steps=2,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
    )
    network = made_trainable(pretrained(job, dtype=torch.float32, device=torch.device("cpu")), job)
    rows: Any = list(rows_in_order(job))
    Recorded(model=network, args=arguments, train_dataset=rows, data_collator=collated).train()
    return losses


@pytest.mark.parametrize("method", ["full", "lora"])
def test_both_shardings_have_the_losses_of_the_transformers_trainer(tmp_path: Path, method: str) -> None:
    model = runs.make_model(tmp_path / "model")
    data = runs.make_data(tmp_path / "data", runs.documents(12), batch=BATCH, steps=STEPS)
    settings = {"method": method, "schedule": {"name": "linear", "warmup_steps": 2}}
    losses = {}
    for engine, sharding in ENGINES.items():
        job = runs.make_job(
            tmp_path / engine, model, data, steps=STEPS, engine=engine, sharding=sharding, settings=settings
        )
        losses[engine] = runs.losses(runs.run(job))
    reference = losses_of_trainer(job, tmp_path / "trainer")
    assert losses["deepspeed"] == pytest.approx(reference, rel=1e-4)
    assert losses["fsdp2"] == pytest.approx(reference, rel=1e-4)
    assert reference[-1] < reference[0]
