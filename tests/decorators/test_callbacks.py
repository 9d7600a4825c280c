"""Callbacks for other trainers, in short training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from decorators.callbacks import for_lightning, for_transformers


@pytest.mark.slow
def test_the_transformers_trainer_reports_each_logged_step(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from tests.estimator.test_trainer_arguments import planned
    from tests.estimator.trainers import train

    plan, reports = planned(), list[dict[str, Any]]()
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=train.STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        include_num_input_tokens_seen="all",
        **plan.to_transformers(),
    )
    callback = for_transformers(lambda **values: reports.append(values))
    rows = train.rows(plan)
    Trainer(model=train.network(), args=arguments, train_dataset=rows, callbacks=[callback]).train()
    assert [each["step"] for each in reports] == [1, 2, 3]
    assert all(3.0 < each["loss"] < 5.0 for each in reports)
    assert {each["tokens"] for each in reports} == {plan.layout.global_batch_size * plan.layout.seq_len}


@pytest.mark.slow
def test_lightning_reports_each_optimizer_step(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed here")
    import torch

    from tests.estimator.test_trainer_arguments import planned

    class Model(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    reports: list[dict[str, Any]] = []
    trainer = lightning.Trainer(
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=str(tmp_path),
        callbacks=[for_lightning(lambda **values: reports.append(values))],
        **planned().to_lightning(),
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(12, 4), batch_size=2))
    assert [each["step"] for each in reports] == [1, 2, 3]
    assert reports[-1]["loss"] < reports[0]["loss"]
