"""Rejection sampling: draw several answers to each prompt, score them, train on the best.

    python flows/rejection_flow.py run --score my_scores.py:short_answers
    python flows/rejection_flow.py run --score reward/model --answers 8 --model llama-8b --with kubernetes

The steps are those of flows/finetune_flow.py with generate, score and select between prepare and train, and
compare after evaluate.
What generate and score have finished is kept shard by shard: a retry or `resume` does not do it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metaflow import Parameter, card, config_expr, current, retry, step

from decorators.card.writer import write_blocks
from decorators.gpu_profile import gpu_profile
from decorators.storage import datastore
from flows.finetune import artifacts, planning, scorers
from flows.finetune.nodes import NodesSteps
from flows.finetune.steps import task_folder
from flows.rejection import card as rejection_card
from flows.rejection import node
from launchers import engines
from launchers.dataset.prepare import held_out_rows
from launchers.dataset.prompts import Prompt
from launchers.engines.reward_head import as_trained
from launchers.rejection.selection import Comparison, mean_of, overview, select
from launchers.settings import help_of
from launchers.store.bundles import get_bundle

CARD_ID = "rejection"


class RejectionFlow(NodesSteps):
    """Train a language model on the best of its own answers, on this machine or on a cluster."""

    asked_score = Parameter(
        "score",
        type=str,
        default=config_expr("settings.rejection.score"),
        help=help_of(planning.REJECTION_FLAGS["score"]),
    )
    asked_answers = Parameter(
        "answers",
        type=int,
        default=config_expr("settings.rejection.answers"),
        help=help_of(planning.REJECTION_FLAGS["answers"]),
    )

    @gpu_profile(plan=planning.plan_from_parameters, request="data")
    @step
    def prepare(self) -> None:
        """Fetch the weights once for the cluster, those of a reward model too; make prompts of the rows."""
        with task_folder("prepare") as work:
            self.model_reference = artifacts.fetch_weights_once(self.base_model, work)
            self.reward_model = scorers.fetch_reward_model_once(
                self.used_settings.rejection.score or "", "rejection.score", work
            )
            self.prompts = node.prepare_prompts(
                self._rows(work)[0],
                self.used_settings,
                artifacts.fetch_tokenizer(self.model_reference, work / "model"),
            )
        self.drawing_nodes = node.drawing_nodes(self.plan)
        self.next(self.generate, foreach="drawing_nodes")

    @card(type="blank", id=CARD_ID)
    @gpu_profile(plan=planning.plan_from_parameters, request="generate")
    @retry(times=2, minutes_between_retries=0)
    @step
    def generate(self) -> None:
        """Draw several answers to each of a node's prompts; the nodes know nothing of each other."""
        with task_folder("generate") as work:
            base = as_trained(
                artifacts.fetch_model(self.model_reference, work / "base"), self.used_settings, work
            )
            self.drawn = node.draw(
                "drawn",
                self.prompts,
                plan=self.plan,
                settings=self.used_settings,
                base_dir=base,
                model_dir=base,
                model_name=self.model_reference,
                work=work / "drawn",
                node=self.input,
                nodes=len(self.drawing_nodes),
            )
            own = range(self.input, self.drawn.shards.count, len(self.drawing_nodes))
            answers = node.answers_in(work / "drawn" / "answers", own)
        for name, value in self.drawn.facts():
            print(f"{name}: {value}")
        blocks = rejection_card.draw_answers(self.drawn.facts(), self.prompts, answers)
        write_blocks(current.card[CARD_ID], blocks)
        self.next(self.score)

    @card(type="blank", id=CARD_ID)
    @gpu_profile(plan=planning.plan_from_parameters, request="score")
    @retry(times=2, minutes_between_retries=0)
    @step
    def score(self, inputs: Any) -> None:
        """Put the nodes' answers together, and score them."""
        self.merge_artifacts(inputs, exclude=["drawn"])
        self.drawn = node.gather([task.drawn for task in inputs])
        with task_folder("score") as work:
            self.scored = self._score("scores", self.prompts, self.drawn, work)
            seen = overview(
                self.prompts, self.drawn.shards.answers(work / "a"), self.scored.scores(work / "s")
            )
        print(f"scores of {seen.drawn.answers:,} answers: {seen.drawn.text()}")
        scored_by = self.used_settings.rejection.score
        write_blocks(current.card[CARD_ID], rejection_card.draw_scores(str(scored_by), seen))
        self.next(self.select)

    @card(type="blank", id=CARD_ID)
    @gpu_profile(plan=planning.plan_from_parameters, request="data")
    @step
    def select(self) -> None:
        """Keep the best answers, and make the data of them that is trained on."""
        with task_folder("select") as work:
            answers = self.drawn.shards.answers(work / "answers")
            self.scores = self.scored.scores(work / "scores")
            self.kept, self.selection = select(
                self.prompts, answers, self.scores, self.used_settings.rejection
            )
        print(self.selection.text())
        scored_by = self.used_settings.rejection.score
        write_blocks(current.card[CARD_ID], rejection_card.draw_selection(str(scored_by), self.selection))
        self._prepare([each.conversation for each in self.kept])
        self.topology = "many" if self.plan.layout.nodes > 1 else "one"
        self.next({"one": self.train, "many": self.fan_out}, condition="topology")

    @gpu_profile(plan=planning.plan_from_parameters, request="evaluate")
    @step
    def evaluate(self) -> None:
        """Held-out loss before and after, and a few answers of the finished model."""
        self._evaluate()
        self.next(self.compare)

    @gpu_profile(plan=planning.plan_from_parameters, request="compare")
    @retry(times=2, minutes_between_retries=0)
    @step
    def compare(self) -> None:
        """Draw and score answers of the finished model to held-out prompts, as before training."""
        held_out = {self.kept[row].index for row in held_out_rows(len(self.kept), self.used_settings)}
        prompts = [prompt for prompt in self.prompts if prompt.index in held_out]
        after = self._attempt("comparison", lambda: self._score_after(prompts)) if prompts else None
        self.comparison = Comparison(prompts=len(prompts), before=mean_of(self.scores, held_out), after=after)
        print(self.comparison.text())
        self.scoring = "tasks" if self.used_settings.harness.tasks else "none"
        self.next({"tasks": self.harness, "none": self.export}, condition="scoring")

    @step
    def end(self) -> None:
        """Say what training on the best answers has done to the score, and where the model is."""
        print(self.comparison.text())
        NodesSteps.end(self)

    def _score_after(self, prompts: list[Prompt]) -> float | None:
        """Return the mean score of the finished model's answers to ``prompts``."""
        with task_folder("compare") as work:
            get_bundle(datastore(), self.outcome.finished_model, work / "finished")
            base = artifacts.fetch_model(self.model_reference, work / "base")
            drawn = node.draw(
                "compared",
                prompts,
                plan=self.plan,
                settings=self.used_settings,
                base_dir=as_trained(base, self.used_settings, work),
                model_dir=engines.result_of(work / "finished"),
                model_name=self.outcome.finished_model,
                work=work / "drawn",
            )
            scores = self._score("compared-scores", prompts, drawn, work / "scored").scores(work / "s")
            return mean_of(scores, {prompt.index for prompt in prompts})

    def _score(self, name: str, prompts: list[Prompt], drawn: node.Drawn, work: Path) -> node.Shards:
        return node.score(
            name,
            prompts,
            drawn,
            plan=self.plan,
            settings=self.used_settings,
            reward_model=self.reward_model,
            work=work / "scored",
        )


if __name__ == "__main__":
    planning.run_flow(RejectionFlow)
