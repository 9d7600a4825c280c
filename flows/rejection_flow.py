"""Rejection sampling: draw several answers to each prompt, score them, train on the best.

    python flows/rejection_flow.py run --score my_scores.py:short_answers
    python flows/rejection_flow.py run --score reward/model --answers 8 --model llama-8b --with kubernetes

The steps are those of flows/finetune_flow.py with generate, score and select between prepare and train, and
compare after evaluate. generate and score store results shard by shard, which a retry or `resume` reuses.
"""

from __future__ import annotations

from estimator import interrupts

if __name__ == "__main__":
    interrupts.end_silently()  # before the imports, which take seconds

# isort: split
from typing import Any

from metaflow import Parameter, card, config_expr, parallel, retry, step

from decorators.gpu_profile import gpu_profile
from estimator.terminal import print
from flows.finetune.flags import REJECTION_FLAGS
from flows.finetune.launch import plan_from_parameters, run_flow
from flows.rejection.steps import CARD_ID, RejectionRun
from launchers.settings import help_of


class RejectionFlow(RejectionRun):
    """Train a language model on its best answers, on this machine or on a cluster."""

    score_option = Parameter(
        "score",
        type=str,
        default=config_expr("settings.rejection.score"),
        help=help_of(REJECTION_FLAGS["score"]),
    )
    answers_option = Parameter(
        "answers",
        type=int,
        default=config_expr("settings.rejection.answers"),
        help=help_of(REJECTION_FLAGS["answers"]),
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
        """Fetch the weights once for the cluster, including a reward model's; build prompts from the rows."""
        self._prepare_prompts()
        self.next(self.generate, foreach="drawing_nodes")

    @card(type="blank", id=CARD_ID)
    @gpu_profile(plan=plan_from_parameters, request="generate")
    @retry(times=2, minutes_between_retries=0)
    @step
    def generate(self) -> None:
        """Draw several answers to each of a node's prompts, independently of the other nodes."""
        self._generate()
        self.next(self.score)

    @card(type="blank", id=CARD_ID)
    @gpu_profile(plan=plan_from_parameters, request="score")
    @retry(times=2, minutes_between_retries=0)
    @step
    def score(self, inputs: Any) -> None:
        """Merge the nodes' answers, and score them."""
        self._score_answers(inputs)
        self.next(self.select)

    @card(type="blank", id=CARD_ID)
    @gpu_profile(plan=plan_from_parameters, request="data")
    @step
    def select(self) -> None:
        """Select the best answers, and build the training data from them."""
        self._select()
        self.topology = "many" if self.plan.layout.nodes > 1 else "one"
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
        self.next(self.compare)

    @gpu_profile(plan=plan_from_parameters, request="compare")
    @retry(times=2, minutes_between_retries=0)
    @step
    def compare(self) -> None:
        """Draw and score answers of the finished model to held-out prompts, as before training."""
        self._compare()
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
        """Print the mean score before and after training, then the report of a fine-tuning run."""
        print(self.comparison.text())
        self._report()


if __name__ == "__main__":
    run_flow(RejectionFlow)
