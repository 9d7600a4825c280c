"""Fine-tune a model: plan, train on one node or several, measure, evaluate, hand over.

    python flows/finetune_flow.py run                                        # tiny-llama, here
    python flows/finetune_flow.py run --model llama-8b --plan-only           # what would it take?
    python flows/finetune_flow.py run --with kubernetes --model llama-70b

The plan is made before the run begins: see flows/finetune_launch.py for that, flows/finetune_steps.py for
the steps, flows/finetune_node.py for what a node does, decorators/gpu_profile.py for how the plan becomes
the steps' resources.
"""

from __future__ import annotations

from typing import Any

from metaflow import current, parallel, retry, step

from decorators._metaflow import in_container
from decorators.gpu_profile import gpu_profile
from estimator.setup import IMAGE_TASK
from flows import finetune_launch
from flows.finetune_node import choose_ports
from flows.finetune_steps import FinetuneSteps
from launchers.cluster.endpoint import Secret


class FinetuneFlow(FinetuneSteps):
    """Fine-tune a language model, on this machine or on a cluster."""

    @gpu_profile(plan=finetune_launch.plan_from_parameters, request="data")
    @step
    def prepare(self) -> None:
        """Fetch the weights once for the cluster; tokenise the data once for all ranks."""
        self._prepare()
        self.topology = "many" if self.plan.layout.nodes > 1 else "one"
        self.way = "encode" if self.used_settings.task == IMAGE_TASK else self.topology
        self.next({"encode": self.encode, "one": self.train, "many": self.fan_out}, condition="way")

    @gpu_profile(plan=finetune_launch.plan_from_parameters, request="encode")
    @retry(times=2, minutes_between_retries=0)
    @step
    def encode(self) -> None:
        """Compute the latents and texts of images once, on the GPUs of one node; what is there is kept."""
        self._encode()
        self.next({"one": self.train, "many": self.fan_out}, condition="topology")

    @step
    def fan_out(self) -> None:
        """Agree on the ports where the nodes will meet and on what only they know, and start them."""
        self.ports = choose_ports(local=not in_container())
        self.secret = Secret.make()
        self.next(self.train_nodes, num_parallel=self.plan.layout.nodes)

    @gpu_profile(plan=finetune_launch.plan_from_parameters)
    @retry(times=2, minutes_between_retries=0)
    @parallel
    @step
    def train_nodes(self) -> None:
        """Train on several nodes: each of these tasks is one."""
        where = current.parallel
        self._train(
            node=where.node_index,
            nodes=where.num_nodes,
            main_host=where.main_ip,
            ports=self.ports,
            secret=self.secret,
        )
        self.next(self.gather)

    @step
    def gather(self, inputs: Any) -> None:
        """Put the nodes' results together; node 0 holds the model and the metrics."""
        nodes = sorted(inputs, key=lambda task: task.node)
        self.merge_artifacts(inputs, exclude=["node", "outcome", "measured", "plan"])
        self.outcome = nodes[0].outcome
        self.plan = self.outcome.plan
        self.measured = nodes[0].measured
        self.measured_nodes = [task.measured for task in nodes]
        self.next(self.evaluate)

    @gpu_profile(plan=finetune_launch.plan_from_parameters, request="evaluate")
    @step
    def evaluate(self) -> None:
        """Held-out loss before and after, and a few answers of the finished model."""
        self._evaluate()
        self.scoring = "tasks" if self.used_settings.harness.tasks else "none"
        self.next({"tasks": self.harness, "none": self.export}, condition="scoring")

    @gpu_profile(plan=finetune_launch.plan_from_parameters, request="evaluate")
    @retry(times=2, minutes_between_retries=0)
    @step
    def harness(self) -> None:
        """Tasks of lm-evaluation-harness, scored by base and finished model."""
        self._run_tasks()
        self.next(self.export)

    @step
    def export(self) -> None:
        """Put the model where the user can take it, with a page that says what it is."""
        self._export()
        self.pushing = "hub" if self.used_settings.export.push else "none"
        self.next({"hub": self.push_model, "none": self.end}, condition="pushing")

    @gpu_profile(plan=finetune_launch.plan_from_parameters, request="data")
    @retry(times=2, minutes_between_retries=1)
    @step
    def push_model(self) -> None:
        """Send the model to the Hugging Face Hub; what it has already is not sent again."""
        self._push()
        self.next(self.end)


if __name__ == "__main__":
    finetune_launch.run_flow(FinetuneFlow)
