"""Python code in a model's folder: detection of models that need it, and refusal unless it is trusted.

Models that transformers supports often list code too (``auto_map``); that code is never run.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from estimator.errors import UserError
from estimator.models import hf_config
from estimator.untrusted import read_json_object
from launchers.base import tokenizer

CONFIG = "config.json"
_LIBRARIES = ("diffusers", "transformers")  # allowed libraries of a pipeline's components
_ADVICE = "Read that code; with --trust-remote-code it runs in the tasks of the run, and nowhere else."


def check_model(folder: Path, *, trust_remote_code: bool = False, advice: str = _ADVICE) -> None:
    """Raise UserError if model or tokenizer need code of the folder and it is not trusted.

    Every model passes if transformers is not installed, as on a machine that only launches runs.
    """
    if trust_remote_code or importlib.util.find_spec("transformers") is None:
        return
    for name, is_needed in ((CONFIG, needs_code), (tokenizer.CONFIG, tokenizer.needs_code)):
        if is_needed(folder):
            raise UserError(
                f"{folder / name} needs code of that folder (auto_map), and transformers cannot load it "
                "without.",
                advice,
            )


def needs_code(folder: Path) -> bool:
    """Whether the model needs code of its folder, because transformers has no class for the model."""
    values = read_json_object(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not values.get("auto_map"):
        return False
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    family = str(values.get("model_type"))
    if hf_config.needs_conversion(values):  # its config.json is rewritten
        family = hf_config.shared_code(family)
    return family not in CONFIG_MAPPING_NAMES


def check_pipeline(index: Path) -> None:
    """Raise UserError if a component in model_index.json is not of diffusers or transformers."""
    for name, component in read_json_object(index).items():
        library = component[0] if isinstance(component, list) and component else None
        if library is not None and library not in _LIBRARIES:
            raise UserError(
                f"{index}: {name} is of {library!r}, and only {' and '.join(_LIBRARIES)} are loaded.",
                "Code in a pipeline's folder is never run: use a pipeline that diffusers has saved.",
            )
