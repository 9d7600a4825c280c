"""Models for chat and serving: from the folder of a finished run, or by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from pydantic import ValidationError

from estimator import models
from estimator.errors import UserError
from estimator.models import DiffusionSpec, ModelSource, ModelSpec, hf_files
from estimator.untrusted import list_contained_files, parse_yaml, read_json_object, read_text
from launchers import engines
from launchers.models import own_code
from launchers.models.adapters import check_adapter
from launchers.models.hf_layout import ADAPTER_V2_CONFIG
from launchers.results.handover import PAGE
from launchers.results.model_card import cache_folder, cache_name
from launchers.run import preparation
from launchers.run_config import RunConfig

ADAPTER_CONFIG = "adapter_config.json"
_CONFIGS = ("config.json", "model_index.json")  # of a language model, of an image pipeline
SETTINGS = "settings.yaml"  # settings of the run, next to the folder of its model
_OWN_CODE = "Chat and serving never run it; vLLM does: vllm serve FOLDER --trust-remote-code"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedModel:
    """A complete model in the Hugging Face layout, or an adapter of one."""

    name: str  # name in messages, tables and requests to servers
    folder: Path
    base: str | None = None  # name of the model that was trained, as estimator.models.locate takes it
    settings: RunConfig | None = None  # settings of the run that trained it
    run: str | None = None  # FLOW/ID of that run
    gpu: str | None = None  # type of the GPU that it was trained on
    source: ModelSource | None = None  # source of a model given by name, which :meth:`fetched` downloads

    @property
    def is_adapter(self) -> bool:
        """Whether the folder holds an adapter instead of a complete model."""
        return any((self.folder / name).is_file() for name in (ADAPTER_CONFIG, ADAPTER_V2_CONFIG))

    def fetched(self, *, vision: bool = False) -> FinishedModel:
        """Fetch the model's files to this machine, if necessary. ``vision``: keep a vision tower."""
        if self.source is None:
            return self
        return replace(self, folder=fetch_cached(self.source, vision=vision), source=None)

    def base_source(self) -> ModelSource:
        """Locate the base model. Raises UserError if its name is unknown."""
        if self.base is None:
            raise UserError(
                f"{self.name}: the model that it was trained from is unknown.",
                f"Name the folder of a run that has {SETTINGS}, or a run by its id.",
            )
        return models.locate(self.base)

    def spec(self) -> ModelSpec:
        """Read the shape of the model; for an adapter, of its base.

        Raises UserError for a model that generates no text.
        """
        if self.source is not None or self.is_adapter:
            spec = models.resolve(self.base_source().name).spec
        else:
            spec = hf_files.read_directory(self.folder, self.name)
        if isinstance(spec, DiffusionSpec):
            raise UserError(f"{self.name} generates images, not text.", f"See its page: {self.folder / PAGE}")
        _check_generates(self.folder)
        return spec


def from_folder(folder: Path) -> FinishedModel:
    """Describe the model in ``folder``: a model, an adapter, or the folder of a run that holds either.

    Raises UserError if there is none.
    """
    folder = folder.expanduser().resolve()
    model_dir = folder if _holds_model(folder) else engines.result_of(folder)
    if not _holds_model(model_dir):
        raise UserError(
            f"There is no model in {folder}.",
            f"Give a folder with config.json or {ADAPTER_CONFIG}, or one that finetune run has written.",
        )
    list_contained_files(model_dir)
    own_code.check_model(model_dir, advice=_OWN_CODE)
    check_adapter(model_dir)
    settings = _read_settings(model_dir.parent / SETTINGS)
    base = settings.model if settings is not None else _base_of(model_dir)
    name = model_dir.name if settings is None else finetuned_name(settings.model)
    plan = model_dir.parent / "plan.json"
    gpu = _gpu_of(plan) if plan.is_file() else None
    return FinishedModel(name=name, folder=model_dir, base=base, settings=settings, gpu=gpu)


def _gpu_of(plan: Path) -> str | None:
    request = read_json_object(plan, "Move it away to use the model without it.").get("request")
    gpu = request.get("gpu_type") if isinstance(request, dict) else None
    return gpu if isinstance(gpu, str) else None


def finetuned_name(base: str) -> str:
    """Return the name of a fine-tuned model: the last part of its base's name, and ``-finetuned``."""
    return f"{Path(base).name}-finetuned"


def from_name(name: str) -> FinishedModel:
    """Describe a model by its name, Hugging Face id or S3 address; its weights are not fetched yet."""
    source = models.locate(name)
    return FinishedModel(name=name, folder=cache_folder() / cache_name(source), base=name, source=source)


def fetch_cached(
    model: ModelSource, *, rewards: bool = False, vision: bool = False, trust_remote_code: bool = False
) -> Path:
    """Fetch a model's files into this machine's cache, and return their folder.

    If the model is a local folder, that folder is returned. ``rewards``: it is a reward model. ``vision``:
    keep the vision tower of a multimodal model. ``trust_remote_code``: the model may run code of its folder.
    """
    folder = cache_folder() / cache_name(model)
    return preparation.fetch_weights(
        model, folder, rewards=rewards, vision=vision, trust_remote_code=trust_remote_code
    ).resolve()


def _holds_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (*_CONFIGS, ADAPTER_CONFIG, ADAPTER_V2_CONFIG))


def _check_generates(folder: Path) -> None:
    """Raise UserError for a reward model or an adapter of one, which predicts no tokens."""
    config_files = [folder / name for name in ("config.json", ADAPTER_CONFIG) if (folder / name).is_file()]
    for values in (read_json_object(path) for path in config_files):
        architectures = values.get("architectures")
        heads = [*(architectures if isinstance(architectures, list) else ()), values.get("task_type")]
        if any(str(head).endswith("ForSequenceClassification") or head == "SEQ_CLS" for head in heads):
            raise UserError(
                f"{folder} is a reward model: it scores texts and generates none.",
                f"See its page for how to use it: {folder / PAGE}",
            )


def _base_of(folder: Path) -> str | None:
    for name in (ADAPTER_CONFIG, ADAPTER_V2_CONFIG):
        if (folder / name).is_file():
            base = read_json_object(folder / name).get("base_model_name_or_path")
            return base if isinstance(base, str) else None
    return None


def _read_settings(path: Path) -> RunConfig | None:
    """Read a run's settings; None if the file is missing."""
    if not path.is_file():
        return None
    try:
        return RunConfig.model_validate(parse_yaml(read_text(path)))
    except (OSError, UnicodeDecodeError, ValidationError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{path} cannot be read: {reason}", "Move it away to use the model without it."
        ) from None
