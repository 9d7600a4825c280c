"""A score for each answer: by a function of the user's, or by a reward model.

``python -m launchers.rejection.scoring request.json`` scores shards of answers. ``check_function`` tries a
function on a built-in sample, before a run has asked for anything.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from estimator.errors import Change, UserError
from launchers.imports import collector_paused
from launchers.rejection import answers as rows
from launchers.rejection.answers import Answers, Prompt, Scores
from launchers.rejection.shards import PROBLEM, make_shards, serve
from launchers.settings import Settings

ScoringFunction = Callable[[str, str], float]
SAMPLE = ("What is Python's `abc` module for?", "Abstract base classes.")  # a prompt and an answer
CHECK_S = 120.0  # that a function may take for the sample, its imports included
MAX_BATCH_TOKENS = {"cuda": 65536, "cpu": 8192}  # padding included, through a reward model at once
_FUNCTION = re.compile(r"(?P<module>[A-Za-z_][\w.]*|.+\.py):(?P<name>[A-Za-z_]\w*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """What the setting rejection.score names."""

    score: str  # as it was given
    function: str | None = None  # None: a reward model
    module: str = ""  # of the function, or its file
    file: str | None = None  # where the module is a file


def scorer_of(score: str) -> Scorer:
    """What a value of rejection.score names: ``x.py:f`` and ``a.b:f`` are functions, all else is a model."""
    found = _FUNCTION.fullmatch(score)
    if found is None:
        return Scorer(score=score)
    module = found["module"]
    is_file = module.endswith(".py")
    return Scorer(score=score, function=found["name"], module=module, file=module if is_file else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringRequest:
    """What is to be scored, and by what. One of ``function`` and ``model_dir`` is there."""

    score: str  # as the user has named it, for errors
    function: str | None = None  # file.py:name or module:name, on this machine
    model_dir: Path | None = None  # of a reward model
    prompts: Path  # rows of Prompt
    answers_dir: Path  # shards of Answers
    shards_dir: Path  # gets the shards of Scores
    shards: int
    work_dir: Path  # gets request.json and request.log
    settings: Settings
    device: Literal["cuda", "cpu"]

    def save(self) -> Path:
        """Write request.json into the work folder."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        self.shards_dir.mkdir(parents=True, exist_ok=True)
        path = self.work_dir / "request.json"
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        path.write_text(json.dumps(values | {"settings": self.settings.model_dump(mode="json")}, default=str))
        return path

    @classmethod
    def load(cls, path: Path) -> ScoringRequest:
        values = json.loads(path.read_text())
        names = ("model_dir", "prompts", "answers_dir", "shards_dir", "work_dir")
        folders = {name: Path(values[name]) for name in names if values[name] is not None}
        return cls(**(values | folders | {"settings": Settings.model_validate(values["settings"])}))


def score(request: ScoringRequest, on_shard: Callable[[int, Path], None]) -> None:
    """Make all shards of scores that are not there yet.

    Raises UserError for what the user can mend, RuntimeError where the process was ended: the same call goes
    on with the shards that are missing.
    """
    make_shards(
        "launchers.rejection.scoring",
        request.save(),
        request.shards_dir,
        range(request.shards),
        device=request.device if request.model_dir else "cpu",
        limit_s=request.settings.resources.hang_timeout_s,
        on_shard=on_shard,
    )


def check_function(function: str) -> None:
    """Raise UserError where a function is not there, or has no finite number for a sample.

    It is called in a process of its own, which prints nothing here.
    """
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder) / "check.json"
        request.write_text(json.dumps({"check": function}))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "launchers.rejection.scoring", str(request)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=CHECK_S,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"Scoring function {function}: no score for a sample within {CHECK_S:g} s.",
                "Score with a faster function.",
            ) from None
        problem = request.with_name(PROBLEM)
        if problem.is_file():
            raise UserError(**json.loads(problem.read_text()))
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UserError(f"Scoring function {function} has ended its process: {last}")


def main(path: Path) -> None:
    """Score the shards that are missing, or try a function, in this process."""
    values = json.loads(path.read_text())
    if "check" in values:
        score_by(load_function(values["check"], values["check"]), values["check"], *SAMPLE)
        return
    request = ScoringRequest.load(path)
    prompts = {prompt.index: prompt for prompt in rows.read_prompts(request.prompts)}
    scorer = _function_scorer(request) if request.function else _RewardModel(request).scores
    for shard in range(request.shards):
        file = request.shards_dir / rows.shard_name(shard)
        if not file.is_file():
            answers = rows.read_answers(request.answers_dir / rows.shard_name(shard))
            rows.write_rows(file, scorer([(prompts[each.index], each) for each in answers]))


def _function_scorer(request: ScoringRequest) -> Callable[[Sequence[tuple[Prompt, Answers]]], list[Scores]]:
    function = load_function(str(request.function), request.score)

    def scores(answered: Sequence[tuple[Prompt, Answers]]) -> list[Scores]:
        return [
            Scores(
                index=prompt.index,
                scores=tuple(
                    score_by(function, request.score, prompt.shown, answer.text) for answer in each.answers
                ),
            )
            for prompt, each in answered
        ]

    return scores


def load_function(function: str, shown: str) -> ScoringFunction:
    """The function that ``file.py:name`` or ``module:name`` names; ``shown``: what errors call it.

    Raises UserError where there is no such file, module or function, or where its code raises.
    """
    scorer = scorer_of(function)
    if scorer.file is not None and not Path(scorer.file).expanduser().is_file():
        raise UserError(f"Scoring function {shown}: there is no file {scorer.file}.")
    try:
        module = (
            importlib.import_module(scorer.module)
            if scorer.file is None
            else _module_of(Path(scorer.file).expanduser())
        )
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        raise UserError(f"Scoring function {shown} can't be imported: {_in_a_line(error)}.") from None
    found = getattr(module, scorer.function or "", None)
    if not callable(found):
        raise UserError(f"Scoring function {shown}: there is no function {scorer.function} in it.")
    loaded: ScoringFunction = found
    return loaded


def _module_of(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"scoring_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def score_by(function: ScoringFunction, shown: str, prompt: str, answer: str) -> float:
    """The function's score. Raises UserError where it raises, or returns anything but a finite number."""
    given = f"for the answer {_shortened(answer)!r} to the prompt {_shortened(prompt)!r}"
    again = "Mend it. A run that has drawn its answers goes on with them: `resume`."
    value: Any
    try:
        value = function(prompt, answer)
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        raise UserError(f"Scoring function {shown} raised {_in_a_line(error)}, {given}.", again) from None
    if hasattr(value, "item"):  # numpy's and torch's numbers
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(
            f"Scoring function {shown} returned {_shortened(repr(value))}, which is no number, {given}.",
            again,
        )
    if not math.isfinite(value):
        raise UserError(f"Scoring function {shown} returned {value}, {given}.", again)
    return float(value)


class _RewardModel:
    """A reward model: one number for a whole conversation, as its own training has tokenised it."""

    def __init__(self, request: ScoringRequest) -> None:
        from launchers.dataset import render
        from launchers.evaluate import load_model, precision_on

        folder = request.model_dir or Path()
        # Its own chat template and tokens, not those of the model that has answered
        self._tokenizer = render.load_tokenizer(folder, Settings())
        self._pad_id = render.pad_id_of(self._tokenizer)
        self._model = load_model(folder, folder, request.device, precision_on(request.device))
        self._longest = getattr(self._model.config, "max_position_embeddings", None) or 2**31
        self._name = request.score

    def scores(self, answered: Sequence[tuple[Prompt, Answers]]) -> list[Scores]:
        """The rewards of all answers."""
        from launchers.dataset import render

        conversations = [
            prompt.with_answer(answer.text) for prompt, each in answered for answer in each.answers
        ]
        tokens = [ids[-self._longest :] for ids, _ in render.tokenise(conversations, self._tokenizer)]
        order = sorted(range(len(tokens)), key=lambda place: -len(tokens[place]))
        rewards = [0.0] * len(tokens)
        most = MAX_BATCH_TOKENS[self._model.device.type]
        while order:
            count = max(1, most // len(tokens[order[0]]))
            batch, order = order[:count], order[count:]
            for place, reward in zip(batch, self._rewards([tokens[place] for place in batch]), strict=True):
                rewards[place] = reward
        wrong = next((reward for reward in rewards if not math.isfinite(reward)), None)
        if wrong is not None:
            raise UserError(f"Reward model {self._name} gave the score {wrong}.", "Score with another one.")
        each_of = iter(rewards)
        return [
            Scores(index=prompt.index, scores=tuple(next(each_of) for _ in each.answers))
            for prompt, each in answered
        ]

    def _rewards(self, rows_of_tokens: Sequence[Any]) -> list[float]:
        import torch

        width = max(len(tokens) for tokens in rows_of_tokens)
        ids = torch.full((len(rows_of_tokens), width), self._pad_id)
        mask = torch.zeros_like(ids)
        for place, tokens in enumerate(rows_of_tokens):
            ids[place, : len(tokens)] = torch.from_numpy(tokens).long()
            mask[place, : len(tokens)] = 1
        device = self._model.device
        with torch.inference_mode():
            logits = self._model(ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
        found: list[float] = logits.squeeze(-1).float().tolist()
        return found


def check_reward_model(folder: Path, shown: str) -> None:
    """Raise UserError where a model folder's config.json is of no reward model: one number for a text."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        raise UserError(
            f"rejection.score {shown}: neither a function nor a model folder with a config.json.",
            ("Give ", Change("rejection.score", "file.py:function"), ", or what task reward exports."),
        ) from None
    labels = config.get("num_labels", len(config.get("id2label") or ()) or 2)
    architectures = config.get("architectures") or ()
    if labels == 1 and any(name.endswith("ForSequenceClassification") for name in architectures):
        return
    raise UserError(
        f"rejection.score {shown} is no reward model: its config.json says "
        f"{', '.join(architectures) or 'nothing'}, {labels} label{'s' * (labels != 1)}.",
        "Give a model with one number for a text, as task reward exports, or a function: file.py:function.",
    )


def _shortened(text: str, limit: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else f"{flat[: limit - 4]} ..."


def _in_a_line(error: BaseException) -> str:
    return _shortened(f"{type(error).__name__}: {error}", 200)


if __name__ == "__main__":
    with collector_paused():
        serve(main)
