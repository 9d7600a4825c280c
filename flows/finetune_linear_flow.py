"""Fine-tune on one node, without a branch: what Step Functions can express.

    python flows/finetune_linear_flow.py run
    python flows/finetune_linear_flow.py --config settings my.yaml step-functions create

Use flows/finetune_flow.py for several nodes; everything else is the same.
"""

from __future__ import annotations

from estimator import interrupts

if __name__ == "__main__":
    interrupts.end_silently()  # before the imports, which take seconds

# isort: split
from metaflow import Parameter, config_expr, retry, step

from decorators.gpu_profile import gpu_profile
from flows.finetune.launch import plan_from_parameters, run_flow
from flows.finetune.steps import FinetuneRun


class FinetuneLinearFlow(FinetuneRun):
    """Fine-tune a language model on one node."""

    nodes = Parameter(
        "nodes",
        type=int,
        default=config_expr("settings.resources.nodes or 1"),
        help="Number of nodes; this flow trains on one only.",
    )

    @gpu_profile(plan=plan_from_parameters, request="none")
    @step
    def start(self) -> None:
        """Resolve the settings against the plan; fetch and check the data."""
        self._start()
        self.next(self.prepare)

    @gpu_profile(plan=plan_from_parameters, request="data")
    @step
    def prepare(self) -> None:
        """Fetch the weights once for the cluster; tokenize the data once for all ranks."""
        self._prepare()
        self.next(self.train)

    @gpu_profile(plan=plan_from_parameters)
    @retry(times=2, minutes_between_retries=0)
    @step
    def train(self) -> None:
        """Train on one node."""
        self._train_alone()
        self.next(self.evaluate)

    @gpu_profile(plan=plan_from_parameters, request="evaluate")
    @step
    def evaluate(self) -> None:
        """Measure held-out loss before and after training, generate example answers, score the tasks."""
        self._evaluate()
        if self.used_settings.harness.tasks:
            self._run_tasks()
        self.next(self.export)

    @step
    def export(self) -> None:
        """Write the finished model and its model card to the output folder; upload it if asked to."""
        self._export()
        if self.used_settings.export.push:
            self._push()
        self.next(self.end)

    @step
    def end(self) -> None:
        """Print example answers, predicted and measured values, where the model is, and the next steps."""
        self._report()


if __name__ == "__main__":
    run_flow(FinetuneLinearFlow)
