"""Loading of a base or finished model for evaluation, in the precision of its device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from estimator.vocabulary import METHODS
from launchers.base.imports import collector_paused, import_peft
from launchers.models import causal
from launchers.models.hf_layout import ADAPTER_V2_CONFIG
from launchers.settings import Settings


def precision_on(device: str) -> str:
    """Return the precision for inference: bf16 on GPUs, fp32 on CPUs."""
    return "bf16" if device == "cuda" else "fp32"


def load_model(
    folder: Path,
    base: Path,
    device: str,
    precision: str,
    settings: Settings | None = None,
    *,
    trust_remote_code: bool = False,
) -> Any:
    """Load a transformers model for inference; an adapter in ``folder`` is applied to ``base``.

    Parameters
    ----------
    device:
        cuda (the model is spread over all GPUs) or cpu.
    precision:
        bf16, or fp32 for any other value.
    settings:
        Settings of the run that trained an adapter; if its base was quantized, the base is quantized here.
    trust_remote_code:
        Whether to run code of the folder if transformers has no class for the model.
    """
    import torch

    options: dict[str, Any] = {"dtype": torch.bfloat16 if precision == "bf16" else torch.float32}
    if device == "cuda":
        options["device_map"] = "auto"
    if (folder / ADAPTER_V2_CONFIG).is_file():
        with collector_paused():
            from launchers.engines.loop import adapter_v2

        return adapter_v2.load(base, folder, **options)
    if (folder / "adapter_config.json").is_file():
        import_peft()
        from peft import PeftModel

        network = causal.load(base, trust_remote_code=trust_remote_code, **options)
        if settings is not None and METHODS[settings.method].quantized:
            from launchers.engines.loop import quantized_model

            quantized_model.round_layers(network, settings.lora.quantization)
        return PeftModel.from_pretrained(network, str(folder)).eval()
    return causal.load(folder, trust_remote_code=trust_remote_code, **options).eval()
