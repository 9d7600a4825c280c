"""Replacement of a model's output layer by a head with one output: transformers' sequence classification.

The files are written once, before training, so that engines, merges and exports need no special case. The
head starts at zero, so all rewards are equal at first.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from estimator.errors import UserError
from launchers.dataset import render
from launchers.engines.new_tokens import with_new_tokens
from launchers.models import hf_layout
from launchers.settings import Settings

HEAD = "score"  # name of the head in all families of transformers
_OUTPUTS = frozenset({"lm_head.weight", "embed_out.weight"})  # output layers, which are not copied
_DONE = "reward_head.json"


def as_trained(model_dir: Path, settings: Settings, work: Path) -> Path:
    """Write the initial model of a run, with new tokens and a reward head if its settings need them.

    Returns its folder below ``work``, or ``model_dir`` if nothing is added.
    """
    return with_reward_head(
        with_new_tokens(model_dir, settings, work / "new_tokens"), settings, work / "reward_head"
    )


def with_reward_head(model_dir: Path, settings: Settings, folder: Path) -> Path:
    """Write the model with a reward head into ``folder``; returns ``model_dir`` for other tasks.

    Unchanged files are linked. A complete folder from an earlier call is reused. Raises UserError if
    transformers has no sequence classification for the model's family.
    """
    if settings.task != "reward":
        return model_dir
    record = json.dumps(str(model_dir.resolve()))
    if (folder / _DONE).is_file() and (folder / _DONE).read_text() == record:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = json.loads((model_dir / "config.json").read_text())
    architecture = _architecture(config["model_type"])
    for path in model_dir.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != hf_layout.INDEX:
            shutil.copyfile(path, folder / path.name)
    pad_id = render.pad_id_of(render.load_tokenizer(model_dir, settings))
    config |= {
        "architectures": [architecture],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "pad_token_id": pad_id,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_weights(model_dir, folder, config["hidden_size"])
    (folder / _DONE).write_text(record)
    return folder


def _architecture(model_type: str) -> str:
    """Return the name of transformers' class for sequence classification of this model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    class_name: str | None = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(model_type)
    if class_name is None:
        raise UserError(
            f"task reward: transformers has no sequence classification for {model_type} models.",
            "Choose a model of another family.",
        )
    return class_name


def _write_weights(model_dir: Path, folder: Path, hidden: int) -> None:
    """Link the weights without the output layer into ``folder``, and write the head to a separate file."""
    import torch
    from safetensors.torch import save_file

    from launchers.engines import _merge

    changed, files, dtypes = folder / "changed", [], set[str]()
    for number, path in enumerate(hf_layout.weight_files(model_dir)):
        header = hf_layout.safetensors_header(path)
        dtypes |= {entry["dtype"] for entry in header.values()}
        if not _OUTPUTS & header.keys():
            files.append(path.resolve())
        elif header.keys() - _OUTPUTS:
            changed_files = changed / str(number)
            _merge.merge([path], changed_files, lambda name, old: None if name in _OUTPUTS else old)
            files.append(changed_files / path.name)
    changed.mkdir(exist_ok=True)
    kind = {"BF16": torch.bfloat16, "F16": torch.float16}.get(next(iter(dtypes)), torch.float32)
    save_file(
        {f"{HEAD}.weight": torch.zeros(1, hidden, dtype=kind)},
        changed / "head.safetensors",
        metadata={"format": "pt"},
    )
    hf_layout.place_weights([*files, changed / "head.safetensors"], folder)
    shutil.rmtree(changed)
