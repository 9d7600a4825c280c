"""Fine-tune a model: plan, train on one or several nodes, measure, evaluate, export.

    python flows/finetune_flow.py run                                        # tiny-llama, here
    python flows/finetune_flow.py run --model llama-8b --plan-only           # what would it take?
    python flows/finetune_flow.py run --with kubernetes --model llama-70b

The plan is made before the run starts (flows/finetune/planning.py), and
decorators/gpu_profile.py turns it into resource requests of the steps. flows/finetune/parameters.py has the
parameters, flows/finetune/steps.py the work of the steps.
"""

from __future__ import annotations

from estimator import interrupts

if __name__ == "__main__":
    interrupts.end_silently()  # before the imports, which take seconds

# isort: split
from typing import Any

from metaflow import parallel, retry, step

from decorators.gpu_profile import gpu_profile
from estimator.vocabulary import TASKS
from flows.finetune.launch import plan_from_parameters, run_flow
from flows.finetune.steps import FinetuneRun


class FinetuneFlow(FinetuneRun):
    """Fine-tune a language model, on this machine or on a cluster."""

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
        self.topology = "many" if self.plan.layout.nodes > 1 else "one"
        self.branch = "encode" if TASKS[self.used_settings.task].images else self.topology
        self.next({"encode": self.encode, "one": self.train, "many": self.fan_out}, condition="branch")

    @gpu_profile(plan=plan_from_parameters, request="encode")
    @retry(times=2, minutes_between_retries=0)
    @step
    def encode(self) -> None:
        """Compute image latents and text embeddings on one node's GPUs; an earlier attempt's are kept."""
        self._encode()
        self.next({"one": self.train, "many": self.fan_out}, condition="topology")

    @gpu_profile(plan=plan_from_parameters)
    @retry(times=2, minutes_between_retries=0)
    @step
    def train(self) -> None:
        """Train on one node."""
        self._train_alone()
        self.next(self.evaluate)

    @step
    def fan_out(self) -> None:
        """Choose ports and a secret for the nodes, and start one task for each node."""
        self._choose_endpoint()
        self.next(self.train_nodes, num_parallel=self.plan.layout.nodes)

    @gpu_profile(plan=plan_from_parameters)
    @retry(times=2, minutes_between_retries=0)
    @parallel
    @step
    def train_nodes(self) -> None:
        """Train on several nodes: each of these tasks is one node."""
        self._train_node()
        self.next(self.gather)

    @step
    def gather(self, inputs: Any) -> None:
        """Merge the results of the nodes."""
        self._gather(inputs)
        self.next(self.evaluate)

    @gpu_profile(plan=plan_from_parameters, request="evaluate")
    @step
    def evaluate(self) -> None:
        """Measure held-out loss before and after training, and generate example answers."""
        self._evaluate()
        self.scoring = "tasks" if self.used_settings.harness.tasks else "none"
        self.next({"tasks": self.harness, "none": self.export}, condition="scoring")

    @gpu_profile(plan=plan_from_parameters, request="evaluate")
    @retry(times=2, minutes_between_retries=0)
    @step
    def harness(self) -> None:
        """Score base and finished model on tasks of lm-evaluation-harness."""
        self._run_tasks()
        self.next(self.export)

    @step
    def export(self) -> None:
        """Write the finished model and its model card to the output folder."""
        self._export()
        self.pushing = "hub" if self.used_settings.export.push else "none"
        self.next({"hub": self.push_model, "none": self.end}, condition="pushing")

    @gpu_profile(plan=plan_from_parameters, request="data")
    @retry(times=2, minutes_between_retries=1)
    @step
    def push_model(self) -> None:
        """Upload the model to the Hugging Face Hub; existing files are skipped."""
        self._push()
        self.next(self.end)

    @step
    def end(self) -> None:
        """Print example answers, predicted and measured values, where the model is, and the next steps."""
        self._report()


if __name__ == "__main__":
    run_flow(FinetuneFlow)
