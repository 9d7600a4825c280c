"""Fine-tune a model: plan, train on one node or several, measure, evaluate, hand over.

    python flows/finetune_flow.py run                                        # tiny-llama, here
    python flows/finetune_flow.py run --model llama-8b --plan-only           # what would it take?
    python flows/finetune_flow.py run --with kubernetes --model llama-70b

The plan is made before the run begins: see flows/finetune/planning.py for that, flows/finetune/steps.py and
flows/finetune/nodes.py for the steps, flows/finetune/node.py for what a node does, decorators/gpu_profile.py
for how the plan becomes the steps' resources.
"""

from __future__ import annotations

from metaflow import retry, step

from decorators.gpu_profile import gpu_profile
from estimator.vocabulary import TASKS
from flows.finetune import planning
from flows.finetune.nodes import NodesSteps


class FinetuneFlow(NodesSteps):
    """Fine-tune a language model, on this machine or on a cluster."""

    @gpu_profile(plan=planning.plan_from_parameters, request="data")
    @step
    def prepare(self) -> None:
        """Fetch the weights once for the cluster; tokenise the data once for all ranks."""
        self._prepare()
        self.topology = "many" if self.plan.layout.nodes > 1 else "one"
        self.way = "encode" if TASKS[self.used_settings.task].images else self.topology
        self.next({"encode": self.encode, "one": self.train, "many": self.fan_out}, condition="way")

    @gpu_profile(plan=planning.plan_from_parameters, request="encode")
    @retry(times=2, minutes_between_retries=0)
    @step
    def encode(self) -> None:
        """Compute the latents and texts of images once, on the GPUs of one node; what is there is kept."""
        self._encode()
        self.next({"one": self.train, "many": self.fan_out}, condition="topology")


if __name__ == "__main__":
    planning.run_flow(FinetuneFlow)
