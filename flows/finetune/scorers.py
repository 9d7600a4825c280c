"""Transport of scorers to the tasks that need them: a user's function, or a reward model."""

from __future__ import annotations

from pathlib import Path

from decorators.storage import datastore
from estimator import models
from estimator.errors import UserError
from flows.finetune import artifacts
from launchers.scoring.functions import scorer_of
from launchers.scoring.reward_model import check_reward_model


def stage_scorer(score: str | None) -> dict[str, str]:
    """Store a local scoring file or reward model in the datastore; return its key by the user's name."""
    if score is None:
        return {}
    scorer = scorer_of(score)
    store = datastore(shared=True)
    if scorer.file is not None:
        return {score: artifacts.stage_file(store, Path(scorer.file).expanduser())}
    source = models.locate(score) if scorer.function is None else None
    if source is not None and source.kind == "folder":
        return {score: artifacts.stage_folder(store, source, rewards=True)}
    return {}


def fetch_reward_model_once(score: str, setting: str, work_dir: Path) -> str | None:
    """Fetch a reward model once for the cluster; return its folder or bundle key, or None for a function.

    ``setting``: name of the setting for messages. Raises UserError if it is no reward model.
    """
    if scorer_of(score).function is not None:
        return None
    reference = artifacts.staged_key(score)
    if reference is None:
        reference = artifacts.fetch_weights_once(models.locate(score), work_dir, rewards=True)
    check_reward_model(artifacts.fetch_tokenizer(reference, work_dir / "reward"), setting, score)
    return reference


def fetch_scorer(score: str, reward_model: str | None, work_dir: Path) -> str:
    """Return the scorer on this machine: ``file.py:function``, ``module:function`` or a model's folder.

    ``reward_model``: result of :func:`fetch_reward_model_once`.
    """
    if reward_model is not None:
        return str(artifacts.fetch_model(reward_model, work_dir / "reward").resolve())
    scorer = scorer_of(score)
    if scorer.file is None:
        return score
    return f"{_scoring_file(score, scorer.file, work_dir / 'function')}:{scorer.function}"


def _scoring_file(name: str, file: str, folder: Path) -> Path:
    """Return the user's file on this machine, fetched from the datastore if the launch stored it."""
    key = artifacts.staged_key(name)
    if key is None:
        path = Path(file).expanduser().resolve()
        if not path.is_file():
            raise UserError(f"Scoring function {name}: there is no file {path} here.")
        return path
    artifacts.fetch_bundle(datastore(shared=True), key, folder)
    return next(path for path in folder.iterdir() if path.suffix == ".py")
