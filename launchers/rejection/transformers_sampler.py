"""Sampler of answers with transformers' ``generate``: prompts in batches, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from estimator.errors import UserError
from launchers.dataset import render
from launchers.dataset.prompts import Prompt
from launchers.evaluation.loading import load_model, precision_on
from launchers.rejection import answers as rows
from launchers.rejection.answers import Answers, BatchLimit, Ends
from launchers.settings import Settings


class TransformersSampler:
    """Samples answers from a model, in batches as large as the limit and the GPU's memory allow.

    Each batch sets the random seed, so the content of a shard does not depend on shards computed before it in
    the same process.
    """

    def __init__(
        self, model_dir: Path, base_dir: Path, settings: Settings, *, device: str, limit: BatchLimit
    ) -> None:
        self._model = load_model(model_dir, base_dir, device, precision_on(device), settings)
        tokenizer = render.load_tokenizer(model_dir, settings)
        tokenizer.padding_side = "left"
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(render.pad_id_of(tokenizer))
        self._tokenizer = tokenizer
        self._limit, self._settings, self._rejection = limit, settings, settings.rejection
        self._max_prompt = rows.max_prompt_tokens(self._model.config, settings)
        self._ends = Ends.of(self._model.generation_config, tokenizer)
        self._max_prompts = 2**31  # per batch; reduced after running out of memory

    def answers(self, prompts: Sequence[Prompt]) -> list[Answers]:
        """Sample answers to each prompt, in the order of the prompts."""
        answers: list[Answers] = []
        remaining = list(prompts)
        while remaining:
            batch = remaining[: self._batch_size(remaining)]
            batch_answers = self._try(batch)
            if batch_answers is None:
                self._max_prompts = len(batch) // 2
                continue
            answers += batch_answers
            remaining = remaining[len(batch) :]
        return answers

    def _batch_size(self, prompts: Sequence[Prompt]) -> int:
        """Return how many of the prompts fit into one batch, at least 1. The first is the longest of them."""
        width = min(prompts[0].tokens, self._max_prompt) + self._rejection.max_new_tokens
        return min(self._max_prompts, self._limit.prompts(width, self._rejection.answers))

    def _try(self, prompts: Sequence[Prompt]) -> list[Answers] | None:
        """Sample answers; None if several prompts at once exceed the GPU's memory."""
        try:
            return self._draw(prompts)
        except torch.cuda.OutOfMemoryError:
            if len(prompts) == 1:
                raise UserError(
                    f"{self._rejection.answers} answers of {self._rejection.max_new_tokens} tokens to one "
                    "prompt do not fit into the GPU's memory.",
                    "Lower --answers or --rejection-max-new-tokens.",
                ) from None
        torch.cuda.empty_cache()
        return None

    def _draw(self, prompts: Sequence[Prompt]) -> list[Answers]:
        inputs = self._tokenizer(
            [prompt.text for prompt in prompts],
            add_special_tokens=False,
            padding=True,
            return_tensors="pt",
            verbose=False,
        )
        # Long prompts are truncated at the beginning, as the question is usually at the end
        ids = inputs.input_ids[:, -self._max_prompt :].to(self._model.device)
        mask = inputs.attention_mask[:, -self._max_prompt :].to(self._model.device)
        torch.manual_seed(rows.seed_of(self._settings.seed, prompts[0].index, len(prompts)))
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                num_return_sequences=self._rejection.answers,
                temperature=self._rejection.temperature,
                top_p=self._rejection.top_p,
                top_k=0,  # the default of transformers keeps only 50 tokens
                max_new_tokens=self._rejection.max_new_tokens,
                pad_token_id=self._tokenizer.pad_token_id,
            )
        answers = [self._ends.answer(tokens) for tokens in output[:, ids.shape[1] :].tolist()]
        per_prompt = self._rejection.answers
        return [
            Answers(index=prompt.index, answers=tuple(answers[place * per_prompt : (place + 1) * per_prompt]))
            for place, prompt in enumerate(prompts)
        ]
