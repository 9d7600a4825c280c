"""Refusal of models and pipelines that only load by running code in their folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from estimator.models import hf_config
from estimator.untrusted import read_json_object

_LIBRARIES = ("diffusers", "transformers")  # of a pipeline's components


def check_model(folder: Path) -> None:
    """Raise UserError if transformers has no class for the model's configuration or tokenizer.

    Such a folder names its code in ``auto_map``. Models that transformers can load by itself often have that
    entry, too, and pass; without transformers (where a run is launched) nothing is known, and all pass.
    """
    for name, has_class in (("config.json", _has_model), ("tokenizer_config.json", _has_tokenizer)):
        path = folder / name
        values = read_json_object(path) if path.is_file() else {}
        if values.get("auto_map") and importlib.util.find_spec("transformers") and not has_class(values):
            raise UserError(
                f"{path} needs code of that folder (auto_map), and transformers cannot load it without.",
                "Code in a model's folder is never run: use a model that transformers has a class for.",
            )


def check_pipeline(index: Path) -> None:
    """Raise UserError for a component of another library than diffusers and transformers."""
    for name, component in read_json_object(index).items():
        library = component[0] if isinstance(component, list) and component else None
        if library is not None and library not in _LIBRARIES:
            raise UserError(
                f"{index}: {name} is of {library!r}, and only {' and '.join(_LIBRARIES)} are loaded.",
                "Code in a pipeline's folder is never run: use a pipeline that diffusers has saved.",
            )


def _has_model(values: dict[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    family = str(values.get("model_type"))
    if hf_config.is_rewritten(values):  # its config.json is rewritten
        family = hf_config.shared_code(family)
    return family in CONFIG_MAPPING_NAMES


def _has_tokenizer(values: dict[str, Any]) -> bool:
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    name = str(values.get("tokenizer_class") or "").removesuffix("Fast")
    return any(tokenizer_class_from_name(candidate) is not None for candidate in (name, f"{name}Fast"))
