"""Callbacks of other trainers that report to the step's profile. A trainer is imported on use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Report = Callable[..., None]


def for_transformers(report: Report) -> Any:
    """Make a ``transformers.TrainerCallback`` that reports each logged step: loss and learning rate.

    Tokens are reported if ``include_num_input_tokens_seen`` is set in the trainer's arguments.
    """
    from transformers import TrainerCallback

    class ReportCallback(TrainerCallback):  # type: ignore[misc]
        """Reports the steps that the trainer logs."""

        tokens_seen = 0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:  # noqa: ARG002
            """Called by the trainer after it has logged a step, or the end of training."""
            if logs and "loss" in logs:
                total_tokens = int(state.num_input_tokens_seen)
                report(
                    step=int(state.global_step),
                    loss=float(logs["loss"]),
                    lr=logs.get("learning_rate"),
                    tokens=total_tokens - self.tokens_seen,
                )
                self.tokens_seen = total_tokens

    return ReportCallback()


def for_lightning(report: Report) -> Any:
    """Make a ``lightning.pytorch.Callback`` that reports each optimizer step and its loss.

    The loss is what ``training_step`` returns, or its ``loss``.
    """
    from lightning.pytorch import Callback

    class ReportCallback(Callback):  # type: ignore[misc]
        """Reports each optimizer step."""

        last_step = 0

        def on_train_batch_end(self, trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
            """Called by Lightning after each micro batch."""
            if trainer.global_step > self.last_step:
                self.last_step = trainer.global_step
                loss = outputs["loss"] if isinstance(outputs, dict) else outputs
                report(step=self.last_step, loss=None if loss is None else float(loss))

    return ReportCallback()
