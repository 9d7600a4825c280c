"""The steps from training to the end, on one node or several, of flows with branches."""

from __future__ import annotations

from typing import Any

from metaflow import current, parallel, retry, step

from decorators._metaflow import in_container
from decorators.gpu_profile import gpu_profile
from flows.finetune import planning
from flows.finetune.steps import FinetuneSteps
from launchers.cluster.endpoint import Secret, choose_ports


class NodesSteps(FinetuneSteps):
    """A flow goes on with ``train`` on one node and with ``fan_out`` on several."""

    @step
    def fan_out(self) -> None:
        """Agree on the ports where the nodes will meet and on what only they know, and start them."""
        self.ports = choose_ports(local=not in_container())
        self.secret = Secret.make()
        self.next(self.train_nodes, num_parallel=self.plan.layout.nodes)

    @gpu_profile(plan=planning.plan_from_parameters)
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

    @gpu_profile(plan=planning.plan_from_parameters, request="evaluate")
    @step
    def evaluate(self) -> None:
        """Held-out loss before and after, and a few answers of the finished model."""
        self._evaluate()
        self.scoring = "tasks" if self.used_settings.harness.tasks else "none"
        self.next({"tasks": self.harness, "none": self.export}, condition="scoring")

    @gpu_profile(plan=planning.plan_from_parameters, request="evaluate")
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

    @gpu_profile(plan=planning.plan_from_parameters, request="data")
    @retry(times=2, minutes_between_retries=1)
    @step
    def push_model(self) -> None:
        """Send the model to the Hugging Face Hub; what it has already is not sent again."""
        self._push()
        self.next(self.end)
