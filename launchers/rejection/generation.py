"""Several answers to each prompt, drawn from a model.

``python -m launchers.rejection.generation request.json`` makes the shards of answers that are missing.
The prompts of a shard are generated for together, padded on the left. Each batch seeds the random numbers
anew, so what a shard holds does not depend on the shards that were made before it in the same process.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from estimator.errors import Change, UserError
from launchers.dataset import prompts, render
from launchers.dataset.prompts import Prompt
from launchers.evaluate import load_model, precision_on
from launchers.imports import collector_paused
from launchers.rejection import answers as rows
from launchers.rejection.answers import Answer, Answers, BatchLimit
from launchers.rejection.shards import make_shards
from launchers.request_process import serve
from launchers.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """What is to be generated, and with what."""

    base_dir: Path
    model_dir: Path  # the model, or an adapter of the base
    prompts: Path  # rows of Prompt
    work_dir: Path  # gets request.json and request.log
    shards_dir: Path  # gets the shards of Answers
    settings: Settings  # its rejection section and its seed
    device: Literal["cuda", "cpu"]
    limit: BatchLimit  # where a batch does not fit on the GPU, it is halved
    node: int = 0
    nodes: int = 1  # of which this one makes every shard whose number leaves ``node`` as the remainder

    def shards(self) -> dict[int, list[Prompt]]:
        """This node's shards, by their number among all."""
        shards = self._all_shards()
        return {shard: shards[shard] for shard in range(self.node, len(shards), self.nodes)}

    def count(self) -> int:
        """How many shards all nodes have."""
        return len(self._all_shards())

    def _all_shards(self) -> list[list[Prompt]]:
        rejection = self.settings.rejection
        return rows.shards_of(
            prompts.read_written(self.prompts),
            rejection.answers,
            limit=self.limit,
            new_tokens=rejection.max_new_tokens,
        )

    def save(self) -> Path:
        """Write request.json into the work folder."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.shards_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "request.json"
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        values |= {"settings": self.settings.model_dump(mode="json"), "limit": dataclasses.asdict(self.limit)}
        path.write_text(json.dumps(values, default=str))
        return path

    @classmethod
    def load(cls, path: Path) -> GenerationRequest:
        values = json.loads(path.read_text())
        names = ("base_dir", "model_dir", "prompts", "work_dir", "shards_dir")
        folders = {name: Path(values[name]) for name in names}
        made = {
            "settings": Settings.model_validate(values["settings"]),
            "limit": BatchLimit(**values["limit"]),
        }
        return cls(**(values | folders | made))


def generate(request: GenerationRequest, on_shard: Callable[[int, Path], None]) -> int:
    """Make the node's shards of answers that are not there yet, and return how many it has.

    Raises UserError for what the user can mend, RuntimeError where the process was ended: the same call goes
    on with the shards that are missing.
    """
    path, shards = request.save(), request.shards()
    make_shards(
        "launchers.rejection.generation",
        path,
        request.shards_dir,
        tuple(shards),
        device=request.device,
        limit_s=request.settings.resources.hang_timeout_s,
        on_shard=on_shard,
    )
    return len(shards)


def main(path: Path) -> None:
    """Make the shards that are missing, in this process."""
    request = GenerationRequest.load(path)
    precision = precision_on(request.device)
    model = load_model(request.model_dir, request.base_dir, request.device, precision, request.settings)
    tokenizer = render.load_tokenizer(request.model_dir, request.settings)
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(render.pad_id_of(tokenizer))
    sampler = _Sampler(model, tokenizer, request)
    for shard, of_shard in request.shards().items():
        file = request.shards_dir / rows.shard_name(shard)
        if not file.is_file():
            rows.write_rows(file, sampler.answers(of_shard))


class _Sampler:
    """Draws answers from a model."""

    def __init__(self, model: Any, tokenizer: Any, request: GenerationRequest) -> None:
        self._model, self._tokenizer, self._limit = model, tokenizer, request.limit
        self._settings, self._rejection = request.settings, request.settings.rejection
        longest = getattr(model.config, "max_position_embeddings", None) or 2**31
        self._room = max(1, longest - self._rejection.max_new_tokens)  # tokens of a prompt
        ends = model.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self._ends = set(ends) if isinstance(ends, (list, tuple)) else {ends}
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
        import torch

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
        import torch

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
        seed = rows.fingerprint(self._settings.seed, prompts[0].index, len(prompts))
        torch.manual_seed(int(seed[:15], 16))
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
        drawn = [self._answer(tokens) for tokens in output[:, ids.shape[1] :].tolist()]
        each = self._rejection.answers
        return [
            Answers(index=prompt.index, answers=tuple(drawn[place * each : (place + 1) * each]))
            for place, prompt in enumerate(prompts)
        ]

    def _answer(self, tokens: Sequence[int]) -> Answer:
        """An answer from its tokens, of which those behind its end are padding."""
        end = next((place for place, token in enumerate(tokens) if token in self._ends), None)
        tokens = tokens if end is None else tokens[: end + 1]
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return Answer(text=text, tokens=len(tokens), ended=end is not None)


if __name__ == "__main__":
    with collector_paused():
        import torch  # noqa: F401 - in less time

    serve(main)
