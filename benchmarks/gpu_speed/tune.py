"""torchtune's own command line, with the names that newer torchao releases moved: arguments of ``tune``."""

from __future__ import annotations

import os
from typing import Any

from estimator.exact.torchtune_imports import torchtune_imports
from launchers.cluster.processes import die_with_parent

PARENT = "GPU_SPEED_PARENT"  # process that this one ends with


def tokenizer(folder: str, max_seq_len: int) -> Any:
    """Build torchtune's tokenizer of a Hugging Face folder, with the attributes that its datasets read."""
    from torchtune.modules.transforms.tokenizers import HuggingFaceBaseTokenizer

    tokenizer_model = HuggingFaceBaseTokenizer(
        f"{folder}/tokenizer.json", tokenizer_config_json_path=f"{folder}/tokenizer_config.json"
    )
    tokenizer_model.max_seq_len, tokenizer_model.pad_id = max_seq_len, 0
    return tokenizer_model


def main() -> None:
    die_with_parent(int(os.environ[PARENT]))
    with torchtune_imports():
        import torchtune.training  # noqa: F401 - the recipes import it when the names are no longer there
        from torchtune._cli.tune import main as tune
    tune()


if __name__ == "__main__":
    main()
