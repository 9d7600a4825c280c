"""Reward model: one score per conversation, tokenized as in the reward model's training."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.option_names import option_name
from launchers.dataset.rows import Conversation
from launchers.settings import Settings

MAX_BATCH_TOKENS = {"cuda": 65536, "cpu": 8192}  # tokens per batch, padding included


class RewardModel:
    """Scores conversations with a transformers model that has one label.

    Parameters
    ----------
    folder:
        The model's folder; its chat template and tokens are used, not those of the answering model.
    model:
        The loaded model.
    name:
        Name of the model in error messages.
    """

    def __init__(self, folder: Path, model: Any, name: str) -> None:
        from launchers.dataset import render

        self._tokenizer = render.load_tokenizer(folder, Settings())
        self._pad_id = render.pad_id_of(self._tokenizer)
        self._model = model
        self._longest = getattr(model.config, "max_position_embeddings", None) or 2**31
        self._name = name

    def rewards(self, conversations: Sequence[Conversation]) -> list[float]:
        """Return the reward of each conversation. Raises UserError if one is not finite."""
        from launchers.dataset import render

        tokens = [ids[-self._longest :] for ids, _ in render.tokenize(conversations, self._tokenizer)]
        order = sorted(range(len(tokens)), key=lambda index: -len(tokens[index]))
        rewards = [0.0] * len(tokens)
        max_tokens = MAX_BATCH_TOKENS[self._model.device.type]
        while order:
            count = max(1, max_tokens // len(tokens[order[0]]))
            batch, order = order[:count], order[count:]
            for index, reward in zip(batch, self._rewards([tokens[index] for index in batch]), strict=True):
                rewards[index] = reward
        invalid = next((reward for reward in rewards if not math.isfinite(reward)), None)
        if invalid is not None:
            raise UserError(
                f"Reward model {self._name} returned the score {invalid}.", "Use another reward model."
            )
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
        rewards: list[float] = logits.squeeze(-1).float().tolist()
        return rewards


def check_reward_model(folder: Path, setting: str, label: str) -> None:
    """Raise UserError if a model folder's config.json is not of a reward model, with one score per text.

    ``setting``: name of the setting that refers to it; ``label``: its value, as shown in messages.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise UserError(
            f"{setting} {label}: neither a function nor a model folder with a config.json.",
            f"Use {option_name(setting)} file.py:function, or a model exported by task reward.",
        ) from None
    labels = config.get("num_labels", len(config.get("id2label") or ()) or 2)
    architectures = config.get("architectures") or ()
    if labels == 1 and any(name.endswith("ForSequenceClassification") for name in architectures):
        return
    raise UserError(
        f"{setting} {label} is not a reward model: its config.json has architecture "
        f"{', '.join(architectures) or 'unknown'}, {labels} label{'s' * (labels != 1)}.",
        "Use a model with one score per text, as exported by task reward, or a function: file.py:function.",
    )
