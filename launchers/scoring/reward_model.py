"""A reward model: one number for a whole conversation, as its own training has tokenised it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estimator.errors import Change, UserError
from launchers.dataset.rows import Conversation
from launchers.settings import Settings

MAX_BATCH_TOKENS = {"cuda": 65536, "cpu": 8192}  # padding included, through a reward model at once


class RewardModel:
    """Scores conversations with a transformers model that has one label.

    Parameters
    ----------
    folder:
        Of the model: its own chat template and tokens are used, not those of the model that has answered.
    model:
        The same, loaded.
    shown:
        What errors call it.
    """

    def __init__(self, folder: Path, model: Any, shown: str) -> None:
        from launchers.dataset import render

        self._tokenizer = render.load_tokenizer(folder, Settings())
        self._pad_id = render.pad_id_of(self._tokenizer)
        self._model = model
        self._longest = getattr(model.config, "max_position_embeddings", None) or 2**31
        self._name = shown

    def rewards(self, conversations: Sequence[Conversation]) -> list[float]:
        """The reward of each conversation. Raises UserError where one is no finite number."""
        from launchers.dataset import render

        tokens = [ids[-self._longest :] for ids, _ in render.tokenise(conversations, self._tokenizer)]
        order = sorted(range(len(tokens)), key=lambda place: -len(tokens[place]))
        rewards = [0.0] * len(tokens)
        most = MAX_BATCH_TOKENS[self._model.device.type]
        while order:
            count = max(1, most // len(tokens[order[0]]))
            batch, order = order[:count], order[count:]
            for place, reward in zip(batch, self._rewards([tokens[place] for place in batch]), strict=True):
                rewards[place] = reward
        wrong = next((reward for reward in rewards if not math.isfinite(reward)), None)
        if wrong is not None:
            raise UserError(f"Reward model {self._name} gave the score {wrong}.", "Score with another one.")
        return rewards

    def _rewards(self, rows_of_tokens: Sequence[Any]) -> list[float]:
        import torch

        width = max(len(tokens) for tokens in rows_of_tokens)
        ids = torch.full((len(rows_of_tokens), width), self._pad_id)
        mask = torch.zeros_like(ids)
        for place, tokens in enumerate(rows_of_tokens):
            ids[place, : len(tokens)] = torch.from_numpy(tokens).long()
            mask[place, : len(tokens)] = 1
        device = self._model.device
        with torch.inference_mode():
            logits = self._model(ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
        found: list[float] = logits.squeeze(-1).float().tolist()
        return found


def check_reward_model(folder: Path, setting: str, shown: str) -> None:
    """Raise UserError where a model folder's config.json is of no reward model: one number for a text.

    ``setting``: the name of the one that has named it.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise UserError(
            f"{setting} {shown}: neither a function nor a model folder with a config.json.",
            ("Give ", Change(setting, "file.py:function"), ", or what task reward exports."),
        ) from None
    labels = config.get("num_labels", len(config.get("id2label") or ()) or 2)
    architectures = config.get("architectures") or ()
    if labels == 1 and any(name.endswith("ForSequenceClassification") for name in architectures):
        return
    raise UserError(
        f"{setting} {shown} is no reward model: its config.json says "
        f"{', '.join(architectures) or 'nothing'}, {labels} label{'s' * (labels != 1)}.",
        "Give a model with one number for a text, as task reward exports, or a function: file.py:function.",
    )
