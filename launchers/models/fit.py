"""Check that a model's files contain exactly the tensors that config.json describes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.base.imports import imported_quietly
from launchers.models import causal
from launchers.models.files import tensor_shapes, weight_files

_NAMED = 3  # maximum number of tensors named in a message
_ADVICE = "Weights and config.json belong to different models, or are incomplete: fetch or export both again."


def check_fits(folder: Path, *, rewards: bool = False, trust_remote_code: bool = False) -> None:
    """Raise UserError if tensors of the model are missing, have another shape, or would not be used.

    A layer missing in the files would be trained from random values; a layer missing in config.json would be
    dropped. To find them, the model is built on torch's meta device (without memory), and transformers loads
    meta tensors with the shapes in the files' headers, which handles renamed, tied and ignored tensors.

    ``rewards``: the model must output one score per text instead of next tokens. ``trust_remote_code``:
    whether code of the model's folder may be run.
    """
    with _silenced():
        _check(folder, tensor_shapes(folder), rewards, trust_remote_code)


@contextmanager
def _silenced() -> Iterator[None]:
    """Suppress progress bars and load reports of transformers, and messages of torchao on import."""
    with causal.without_progress_bars():
        from transformers.utils import logging as transformers_logging

        torchao, verbosity = logging.getLogger("torchao"), transformers_logging.get_verbosity()
        level = torchao.level
        transformers_logging.set_verbosity(transformers_logging.CRITICAL)
        torchao.setLevel(logging.ERROR)
        try:
            yield
        finally:
            torchao.setLevel(level)
            transformers_logging.set_verbosity(verbosity)


def _check_layers(folder: Path, config: Any, tensors: int) -> None:
    """Raise UserError if the model has more layers than tensors: building them takes time and memory."""
    for name in ("num_hidden_layers", "num_encoder_layers", "num_decoder_layers"):
        layers = getattr(config, name, None)
        if isinstance(layers, int) and layers > tensors:
            raise UserError(
                f"{folder}: config.json has {name} {layers:,}, and the weights have {tensors:,} tensors.",
                _ADVICE,
            )


def _check(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], rewards: bool, trust_remote_code: bool
) -> None:
    """Compare the tensors of these shapes with the model of config.json; raises UserError."""
    import torch

    meta_model = _empty_model(folder, len(shapes), rewards, trust_remote_code)
    # If the files contain both of two tied weights, transformers compares their values, unknown on meta
    stored_twice = {
        name: tied_to
        for name, tied_to in meta_model.all_tied_weights_keys.items()
        if {name, tied_to} <= shapes.keys()
    }
    for name, tied_to in stored_twice.items():
        _check_equal(folder, name, tied_to)
    tensors = {
        name: torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for name, shape in shapes.items()
        if name not in stored_twice
    }
    try:
        _, differences = type(meta_model).from_pretrained(
            None,
            config=meta_model.config,
            state_dict=tensors,
            device_map={"": "meta"},
            dtype=torch.bfloat16,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except RuntimeError:  # tensors that are merged on loading, such as experts, have incompatible shapes
        differences = _differences(meta_model, shapes)
    problem = _describe_differences(
        missing=sorted(differences["missing_keys"]),
        mismatched=[
            f"{name} is {list(actual)} instead of {list(expected)}"
            for name, actual, expected in sorted(differences["mismatched_keys"])
        ],
        unused=sorted(differences["unexpected_keys"]),
    )
    if problem:
        raise UserError(f"{folder}: the weights don't fit config.json: {problem}.", _ADVICE)


def _empty_model(folder: Path, tensors: int, rewards: bool, trust_remote_code: bool) -> Any:
    """Build the model of config.json on the meta device; raises UserError.

    ``tensors``: number of tensors in the files, the maximum number of layers.
    """
    import torch
    from huggingface_hub.errors import StrictDataclassError

    try:
        config = causal.configuration(folder, trust_remote_code=trust_remote_code)
        trusted = causal.runs_code(folder, trust_remote_code)
        _check_layers(folder, config.get_text_config(), tensors)
        kind = causal.class_of(config, rewards=rewards)
        with imported_quietly(), torch.device("meta"):
            return kind.from_config(config, trust_remote_code=trusted)
    except (ImportError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{folder / 'config.json'}: transformers cannot build a model of it: {reason}",
            "Use the config.json that was published with the weights.",
        ) from None


def _check_equal(folder: Path, name: str, tied_to: str) -> None:
    """Raise UserError if two tied tensors differ; torchtune would silently ignore ``name``."""
    import torch
    from safetensors import safe_open

    values: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            values |= {tensor: file.get_tensor(tensor) for tensor in {name, tied_to} & set(file.keys())}
    if not torch.equal(values[name], values[tied_to]):
        raise UserError(
            f"{folder}: config.json has tie_word_embeddings, and the weights have a {name} that differs from "
            f"{tied_to}.",
            "If the model has a separate head, set tie_word_embeddings to false in config.json.",
        )


def _differences(meta_model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Compare the files' tensors with those that transformers would save.

    Returns a mapping with keys of from_pretrained's loading info: missing, mismatched, unexpected.
    """
    from transformers.core_model_loading import revert_weight_conversion

    saved = {
        name: tuple(tensor.shape)
        for name, tensor in revert_weight_conversion(meta_model, meta_model.state_dict()).items()
    }
    return {
        "missing_keys": saved.keys() - shapes.keys() - meta_model.all_tied_weights_keys.keys(),
        "mismatched_keys": [
            (name, shape, saved[name]) for name, shape in shapes.items() if saved.get(name, shape) != shape
        ],
        "unexpected_keys": shapes.keys() - saved.keys(),
    }


def _describe_differences(*, missing: Sequence[str], mismatched: Sequence[str], unused: Sequence[str]) -> str:
    """List the differences with the first tensors of each kind; empty if there are none."""
    parts = (("missing", missing), ("of another shape", mismatched), ("not used by such a model", unused))
    return "; ".join(
        f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'} {problem} "
        f"({', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''})"
        for problem, names in parts
        if names
    )
