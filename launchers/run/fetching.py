"""Download of a run's inputs in advance, for nodes without internet access."""

from __future__ import annotations

import os
from pathlib import Path

from estimator import models
from estimator.errors import UserError
from estimator.terminal import print
from launchers import run_config
from launchers.dataset import mixture, sources
from launchers.results.model_card import slug
from launchers.run import preparation
from launchers.scoring.functions import scorer_of
from launchers.settings import Settings

_REMOTE_MODELS = ("table", "hub", "s3")


def fetch_inputs(settings: Settings, folder: Path) -> Settings:
    """Download datasets, weights, tokenizer and reward model into ``folder``; return settings with paths.

    Local and generated inputs are not changed. All rows are read once, so malformed data is found here. A
    model in the Hub's cache is used from there; existing model files are not downloaded again. Raises
    UserError for an unavailable input, and if HF_HUB_OFFLINE is set although the Hub is needed.
    """
    _check_online(settings)
    folder = folder.expanduser().absolute()
    paths = {name: _fetch_dataset(settings, name, folder / "data") for name in _datasets(settings)}
    evaluation = settings.evaluation
    fetched = settings.model_copy(
        update={
            "dataset": paths[settings.dataset],
            "mixture": {paths[name]: weight for name, weight in settings.mixture.items()},
            "evaluation": evaluation.model_copy(
                update={"dataset": paths[evaluation.dataset] if evaluation.dataset else None}
            ),
        }
    )
    model = models.resolve(settings.model, online=True)
    if model.kind in _REMOTE_MODELS:
        with_defaults = run_config.apply_defaults(fetched, model.spec)
        vision = preparation.with_vision(with_defaults, model.spec).vision is not None
        target = folder / "models" / slug(model.location or model.name)
        path = preparation.fetch_weights(
            model, target, vision=vision, trust_remote_code=settings.trust_remote_code, runs_code=False
        )
        print(f"{settings.model}: weights and tokenizer are in {path}", flush=True)
        fetched = fetched.model_copy(update={"model": str(path)})
    reward = _reward_model(settings)
    if reward is not None and reward.kind in _REMOTE_MODELS:
        target = folder / "models" / slug(reward.location or reward.name)
        path = preparation.fetch_weights(reward, target, rewards=True)
        fetched = fetched.model_copy(update={"rl": settings.rl.model_copy(update={"reward": str(path)})})
    return fetched


def _datasets(settings: Settings) -> list[str]:
    return [name for name in (*mixture.names(settings), settings.evaluation.dataset) if name]


def _fetch_dataset(settings: Settings, name: str, folder: Path) -> str:
    """Fetch one dataset and read all its rows; return its path, or its name if it needs no network."""
    if sources.kind_of(name) == "built-in":
        return name
    if sources.kind_of(name) == "path":
        path = sources.local_path(name)
    else:
        path = sources.fetch(name, folder / slug(name))
    rows = sum(1 for _ in preparation.read_samples(settings, path, fetches=False))
    print(f"{name}: {rows:,} rows, all well-formed, in {path}", flush=True)
    return name if sources.kind_of(name) == "path" else str(path)


def _reward_model(settings: Settings) -> models.ModelSource | None:
    """Return the source of the reward model; None if the reward is a function or not set."""
    reward = settings.rl.reward
    return None if reward is None or scorer_of(reward).function is not None else models.locate(reward)


def _check_online(settings: Settings) -> None:
    """Raise UserError if the Hub is needed and HF_HUB_OFFLINE forbids its use."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "TRUE", "YES", "ON"):
        return
    reward = _reward_model(settings)
    located = [models.locate(settings.model), *([reward] if reward else [])]
    names = [source.name for source in located if source.kind in ("table", "hub")]
    names += [name for name in _datasets(settings) if sources.kind_of(name) == "hub"]
    if names:
        raise UserError(
            f"HF_HUB_OFFLINE is set, so {', '.join(names)} cannot be fetched.",
            "Run this on a machine with internet access: env -u HF_HUB_OFFLINE finetune fetch ...",
        )
