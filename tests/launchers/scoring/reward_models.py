"""An untrained reward model whose scores differ between answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from launchers.engines.reward_head import with_reward_head
from launchers.models import tiny_llama
from launchers.settings import Settings


def make(folder: Path) -> Path:
    """Create tiny-llama with a random head, below ``folder``."""
    from safetensors.numpy import load_file, save_file

    base = tiny_llama.make(folder / "base")
    model = with_reward_head(base, Settings(task="reward"), folder / "model")
    for path in model.glob("*.safetensors"):
        weights = load_file(path)
        if "score.weight" in weights:
            drawn = np.random.default_rng(0).normal(size=weights["score.weight"].shape)
            weights["score.weight"] = drawn.astype(np.float32)
            path.unlink()
            save_file(weights, path, metadata={"format": "pt"})
    return model
