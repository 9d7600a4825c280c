"""Check of a PEFT adapter, before PEFT allocates tensors of the sizes in its adapter_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.untrusted import read_json_object
from launchers.models.files import read_header

_CONFIG, _WEIGHTS, _PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_ROW_BYTES = 512  # minimum bytes per LoRA rank, over all layers
_SIZES = ("r", "num_virtual_tokens", "token_dim", "encoder_hidden_size", "adapter_len")


def check_adapter(folder: Path) -> None:
    """Raise UserError if a size in adapter_config.json exceeds all dimensions of the weights.

    PEFT allocates tensors of these sizes before it compares them with the weights. A folder without
    ``adapter_config.json`` passes.
    """
    path, weights = folder / _CONFIG, folder / _WEIGHTS
    if not path.is_file():
        return
    values = read_json_object(path)
    sizes: dict[str, Any] = {name: values.get(name) for name in _SIZES}
    if isinstance(ranks := values.get("rank_pattern"), dict):
        sizes |= {f"rank_pattern of {name}": size for name, size in ranks.items()}
    largest = 0
    if weights.is_file():
        shapes = read_header(weights, quantized=True).values()
        largest = max((size for shape in shapes for size in shape), default=0)
    elif (pickled := folder / _PICKLED).is_file():
        largest = pickled.stat().st_size // _ROW_BYTES  # shapes are unknown before loading
    for name, size in sizes.items():
        if size is None or (isinstance(size, int) and 0 <= size <= largest):
            continue
        reason = f"its weights have no dimension above {largest:,}" if largest else f"{_WEIGHTS} is missing"
        raise UserError(f"{path}: {name} is {size!r:.50}, and {reason}.", "Fetch the adapter again.")
