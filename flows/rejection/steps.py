"""The work of the steps of a rejection sampling run; flows/rejection_flow.py declares the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metaflow import current

from decorators.card.writer import write_blocks
from decorators.storage import datastore
from estimator.terminal import print
from flows.finetune import artifacts, scorers
from flows.finetune.steps import FinetuneRun, task_folder
from flows.rejection import card, node
from launchers import engines
from launchers.dataset.prepare import held_out_rows
from launchers.dataset.prompts import Prompt
from launchers.engines.reward_head import as_trained
from launchers.rejection.selection import Comparison, mean_of, overview, select
from launchers.store.bundles import get_bundle

CARD_ID = "rejection"


class RejectionRun(FinetuneRun):
    """Work of a rejection sampling run, in addition to that of a fine-tuning run."""

    def _prepare_prompts(self) -> None:
        """Fetch the weights, including a reward model's; build prompts from the rows."""
        with task_folder("prepare") as work_dir:
            self.model_reference = artifacts.fetch_weights_once(self.base_model, work_dir)
            self.reward_model = scorers.fetch_reward_model_once(
                self.used_settings.rejection.score or "", "rejection.score", work_dir
            )
            self.prompts = node.prepare_prompts(
                self._rows(work_dir)[0],
                self.used_settings,
                artifacts.fetch_tokenizer(self.model_reference, work_dir / "model"),
            )
        self.drawing_nodes = node.drawing_nodes(self.plan)

    def _generate(self) -> None:
        """Draw answers to this task's share of the prompts."""
        with task_folder("generate") as work_dir:
            base = as_trained(
                artifacts.fetch_model(self.model_reference, work_dir / "base"), self.used_settings, work_dir
            )
            self.drawn = node.draw(
                "drawn",
                self.prompts,
                plan=self.plan,
                settings=self.used_settings,
                base_dir=base,
                model_dir=base,
                model_name=self.model_reference,
                work_dir=work_dir / "drawn",
                node=self.input,
                nodes=len(self.drawing_nodes),
            )
            own_shards = range(self.input, self.drawn.shards.count, len(self.drawing_nodes))
            answers = node.answers_in(work_dir / "drawn" / "answers", own_shards)
        for name, value in self.drawn.facts():
            print(f"{name}: {value}")
        blocks = card.draw_answers(self.drawn.facts(), self.prompts, answers)
        write_blocks(current.card[CARD_ID], blocks)

    def _score_answers(self, inputs: Any) -> None:
        """Merge the answers of the tasks of ``generate``, and score them."""
        self.merge_artifacts(inputs, exclude=["drawn"])
        self.drawn = node.gather([task.drawn for task in inputs])
        with task_folder("score") as work_dir:
            self.scored = self._score("scores", self.prompts, self.drawn, work_dir)
            summary = overview(
                self.prompts, self.drawn.shards.answers(work_dir / "a"), self.scored.scores(work_dir / "s")
            )
        print(f"scores of {summary.drawn.answers:,} answers: {summary.drawn.text()}")
        scored_by = self.used_settings.rejection.score
        write_blocks(current.card[CARD_ID], card.draw_scores(str(scored_by), summary))

    def _select(self) -> None:
        """Select the best answers, and tokenize them as the training data."""
        with task_folder("select") as work_dir:
            answers = self.drawn.shards.answers(work_dir / "answers")
            self.scores = self.scored.scores(work_dir / "scores")
            self.kept, self.selection = select(
                self.prompts, answers, self.scores, self.used_settings.rejection
            )
        print(self.selection.text())
        scored_by = self.used_settings.rejection.score
        write_blocks(current.card[CARD_ID], card.draw_selection(str(scored_by), self.selection))
        self._prepare([item.conversation for item in self.kept])

    def _compare(self) -> None:
        """Draw and score answers of the finished model to held-out prompts, as before training."""
        held_out = {self.kept[row].index for row in held_out_rows(len(self.kept), self.used_settings)}
        prompts = [prompt for prompt in self.prompts if prompt.index in held_out]
        after = self._attempt("comparison", lambda: self._score_after(prompts)) if prompts else None
        self.comparison = Comparison(prompts=len(prompts), before=mean_of(self.scores, held_out), after=after)
        print(self.comparison.text())

    def _score_after(self, prompts: list[Prompt]) -> float | None:
        """Return the mean score of the finished model's answers to ``prompts``."""
        with task_folder("compare") as work_dir:
            get_bundle(datastore(), self.outcome.finished_model, work_dir / "finished")
            base = artifacts.fetch_model(self.model_reference, work_dir / "base")
            drawn = node.draw(
                "compared",
                prompts,
                plan=self.plan,
                settings=self.used_settings,
                base_dir=as_trained(base, self.used_settings, work_dir),
                model_dir=engines.result_of(work_dir / "finished"),
                model_name=self.outcome.finished_model,
                work_dir=work_dir / "drawn",
            )
            scores = self._score("compared-scores", prompts, drawn, work_dir / "scored").scores(
                work_dir / "s"
            )
            return mean_of(scores, {prompt.index for prompt in prompts})

    def _score(self, name: str, prompts: list[Prompt], drawn: node.Drawn, work_dir: Path) -> node.Shards:
        return node.score(
            name,
            prompts,
            drawn,
            plan=self.plan,
            settings=self.used_settings,
            reward_model=self.reward_model,
            work_dir=work_dir / "scored",
        )
