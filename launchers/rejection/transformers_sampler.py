"""Answers drawn by transformers' ``generate``: the prompts of a batch together, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from estimator.errors import Change, UserError
from launchers.dataset import render
from launchers.dataset.prompts import Prompt
from launchers.evaluate import load_model, precision_on
from launchers.rejection import answers as rows
from launchers.rejection.answers import Answers, BatchLimit, Ends
from launchers.settings import Settings


class TransformersSampler:
    """Draws answers from a model, in batches as large as the limit says and the GPU's memory allows.

    Each batch seeds the random numbers anew, so what a shard holds does not depend on the shards that were
    made before it in the same process.
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
        self._room = rows.prompt_room(self._model.config, settings)
        self._ends = Ends.of(self._model.generation_config, tokenizer)
        self._most_prompts = 2**31  # at once; less where memory did not do

    def answers(self, asked: Sequence[Prompt]) -> list[Answers]:
        """The answers to each prompt, in the order of the prompts."""
        found: list[Answers] = []
        left = list(asked)
        while left:
            batch = left[: self._fitting(left)]
            answered = self._try(batch)
            if answered is None:
                self._most_prompts = len(batch) // 2
                continue
            found += answered
            left = left[len(batch) :]
        return found

    def _fitting(self, prompts: Sequence[Prompt]) -> int:
        """How many of the prompts go into one batch, one at least. The first is the longest of them."""
        width = min(prompts[0].tokens, self._room) + self._rejection.max_new_tokens
        return min(self._most_prompts, self._limit.prompts(width, self._rejection.answers))

    def _try(self, prompts: Sequence[Prompt]) -> list[Answers] | None:
        """The answers; None where the GPU's memory does not do for several prompts at once."""
        try:
            return self._draw(prompts)
        except torch.cuda.OutOfMemoryError:
            if len(prompts) == 1:
                raise UserError(
                    f"{self._rejection.answers} answers of {self._rejection.max_new_tokens} tokens to one "
                    "prompt do not fit into the GPU's memory.",
                    (
                        "Use ",
                        Change("rejection.answers"),
                        " or ",
                        Change("rejection.max_new_tokens"),
                        " with less.",
                    ),
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
        # The end of a prompt that is too long: what it asks for is rather there
        ids = inputs.input_ids[:, -self._room :].to(self._model.device)
        mask = inputs.attention_mask[:, -self._room :].to(self._model.device)
        torch.manual_seed(rows.seed_of(self._settings.seed, prompts[0].index, len(prompts)))
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                num_return_sequences=self._rejection.answers,
                temperature=self._rejection.temperature,
                top_p=self._rejection.top_p,
                top_k=0,  # transformers' own default leaves out all but 50 tokens
                max_new_tokens=self._rejection.max_new_tokens,
                pad_token_id=self._tokenizer.pad_token_id,
            )
        drawn = [self._ends.answer(tokens) for tokens in output[:, ids.shape[1] :].tolist()]
        each = self._rejection.answers
        return [
            Answers(index=prompt.index, answers=tuple(drawn[place * each : (place + 1) * each]))
            for place, prompt in enumerate(prompts)
        ]
