"""Adding of tokens to a model: to its tokenizer and configuration, and as rows of its embedding and head.

The files are written once, before training, so that engines, merges and exports need no special case.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.dataset import render
from launchers.models import hf_layout
from launchers.settings import Settings

WITH_ROWS = ("model.embed_tokens.weight", "lm_head.weight")  # in the supported families
_DONE = "new_tokens.json"


def with_new_tokens(model_dir: Path, settings: Settings, folder: Path) -> Path:
    """Write the model with ``settings.new_tokens`` into ``folder``; returns ``model_dir`` if there are none.

    Unchanged files are linked. A complete folder from an earlier call is reused.
    """
    if not settings.new_tokens:
        return model_dir
    record = json.dumps([str(model_dir.resolve()), *settings.new_tokens])
    if (folder / _DONE).is_file() and (folder / _DONE).read_text() == record:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    base_settings = settings.model_copy(update={"new_tokens": ()})
    base_size, tokenizer = (
        len(render.load_tokenizer(model_dir, base_settings)),
        render.load_tokenizer(model_dir, settings),
    )
    new = range(base_size, len(tokenizer))
    config = json.loads((model_dir / "config.json").read_text())
    old_vocab, new_vocab = config["vocab_size"], max(config["vocab_size"], len(tokenizer))
    for path in model_dir.iterdir():
        if path.suffix == ".safetensors":
            _link_or_grow(path, folder, new, new_vocab)
        elif path.is_file():
            shutil.copyfile(path, folder / path.name)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": new_vocab}, indent=2) + "\n")
    _check(folder, old_vocab, new_vocab)
    (folder / _DONE).write_text(record)
    return folder


def _link_or_grow(path: Path, folder: Path, new: range, vocab: int) -> None:
    if not set(WITH_ROWS) & hf_layout.safetensors_header(path).keys():
        hf_layout.link(path.resolve(), folder / path.name)
        return
    from launchers.engines import _merge  # imports torch

    temporary = folder / "grown"
    _merge.merge(
        [path], temporary, lambda name, old: _extended(old, new, vocab) if name in WITH_ROWS else old
    )
    (temporary / path.name).rename(folder / path.name)
    temporary.rmdir()


def _extended(old: Any, new: range, vocab: int) -> Any:
    """Return ``old`` extended to ``vocab`` rows; rows of ``new`` tokens are the mean of all other rows.

    transformers' resize_token_embeddings adds noise to that mean, with 1e-9 of the rows' covariance.
    """
    import torch

    trained_rows = min(len(old), new.start)
    mean = torch.zeros(old.shape[1], dtype=torch.float64)
    for rows in old[:trained_rows].split(4096):
        mean += rows.double().sum(dim=0)
    resized = torch.empty(vocab, old.shape[1], dtype=old.dtype)
    resized[: len(old)] = old
    resized[new.start :][: len(new)] = (mean / trained_rows).to(old.dtype)
    return resized


def _check(folder: Path, old_vocab: int, new_vocab: int) -> None:
    """Raise UserError if a matrix with one row per token was not extended, because its name is unknown."""
    for path in folder.glob("*.safetensors"):
        for name, entry in hf_layout.safetensors_header(path).items():
            if new_vocab > old_vocab and entry["shape"][:1] == [old_vocab]:
                raise UserError(
                    f"new_tokens: {name} has a row for each token and is not known here.",
                    "Add the tokens to the model yourself, and give its folder.",
                )
