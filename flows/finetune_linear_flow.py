"""Fine-tune on one node, without a branch: what Step Functions can express.

    python flows/finetune_linear_flow.py run
    python flows/finetune_linear_flow.py --config settings my.yaml step-functions create

Everything else is as in flows/finetune_flow.py; several nodes are for that one.
"""

from __future__ import annotations

from metaflow import Parameter, config_expr, step

from decorators.gpu_profile import gpu_profile
from flows.finetune import planning
from flows.finetune.steps import FinetuneSteps


class FinetuneLinearFlow(FinetuneSteps):
    """Fine-tune a language model on one node."""

    nodes = Parameter(
        "nodes",
        type=int,
        default=config_expr("settings.resources.nodes or 1"),
        help="There is no step for more.",
    )

    @gpu_profile(plan=planning.plan_from_parameters, request="data")
    @step
    def prepare(self) -> None:
        """Fetch the weights once for the cluster; tokenise the data once for all ranks."""
        self._prepare()
        self.next(self.train)


if __name__ == "__main__":
    planning.run_flow(FinetuneLinearFlow)
