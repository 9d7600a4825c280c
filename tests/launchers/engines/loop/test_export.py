"""What the loop leaves at the end."""

from __future__ import annotations

import json
from pathlib import Path

from launchers.engines.loop import export


def test_only_one_of_two_copies_of_the_weights_is_merged(tmp_path: Path) -> None:
    """Mistral's repositories hold consolidated.safetensors beside transformers' own files."""
    for name in ("model-00001-of-00001.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = export._weight_files(tmp_path)
    assert [path.name for path in found] == ["model-00001-of-00001.safetensors"]
