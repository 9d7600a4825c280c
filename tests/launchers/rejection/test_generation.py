"""Answers drawn in shards: the same again for the same seed, and none twice."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchers.dataset import render
from launchers.dataset.prompts import prompts_of
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Message
from launchers.models import tiny_llama
from launchers.rejection import answers as rows
from launchers.rejection import shards
from launchers.rejection.generation import GenerationRequest, generate
from launchers.sections import Rejection
from launchers.settings import Settings

CHATS = [
    Conversation(
        messages=(
            Message(role="user", content=" ".join(["word"] * (1 + index % 5)) + f" {index}"),
            Message(role="assistant", content="x"),
        )
    )
    for index in range(40)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.make(folder)
    return folder


def request(
    model: Path, folder: Path, *, new_tokens: int = 5, node: int = 0, nodes: int = 1, **rejection: Any
) -> GenerationRequest:
    folder.mkdir(exist_ok=True)
    settings = Settings(rejection=Rejection(answers=4, max_new_tokens=new_tokens, **rejection))
    rows.write_rows(folder / "prompts.jsonl", prompts_of(CHATS, render.load_tokenizer(model, settings)))
    return GenerationRequest(
        base_dir=model,
        model_dir=model,
        prompts=folder / "prompts.jsonl",
        work_dir=folder / "work",
        shards_dir=folder / "shards",
        settings=settings,
        device="cpu",
        limit=rows.BatchLimit(sequences=64, tokens=16384),
        node=node,
        nodes=nodes,
    )


def test_a_shard_that_is_missing_is_made_again_as_it_was_and_no_other(model: Path, tmp_path: Path) -> None:
    made: list[int] = []
    asked = request(model, tmp_path / "run")
    assert generate(asked, lambda shard, _: made.append(shard)) == 3
    assert made == [0, 1, 2]
    before = {path.name: path.read_text() for path in asked.shards_dir.iterdir()}
    (asked.shards_dir / rows.shard_name(1)).unlink()
    generate(asked, lambda shard, _: made.append(shard))
    assert made == [0, 1, 2, 1]
    assert {path.name: path.read_text() for path in asked.shards_dir.iterdir()} == before
    found = [each for path in sorted(asked.shards_dir.iterdir()) for each in rows.read_answers(path)]
    assert sorted(each.index for each in found) == list(range(40))
    assert all(len(each.answers) == 4 for each in found)
    assert all(1 <= answer.tokens <= 5 for each in found for answer in each.answers)
    assert any(len({answer.text for answer in each.answers}) > 1 for each in found), "answers are drawn"


def test_two_nodes_draw_what_one_draws(model: Path, tmp_path: Path) -> None:
    alone = request(model, tmp_path / "alone")
    generate(alone, lambda *_: None)
    made: dict[int, list[int]] = {0: [], 1: []}
    for node, own in made.items():
        asked = request(model, tmp_path / str(node), node=node, nodes=2)
        generate(asked, lambda shard, _, own=own: own.append(shard))
        assert asked.count() == 3
        for shard in own:
            name = rows.shard_name(shard)
            assert (asked.shards_dir / name).read_text() == (alone.shards_dir / name).read_text()
    assert made == {0: [0, 2], 1: [1]}
    assert generate(request(model, tmp_path / "idle", node=3, nodes=4), lambda *_: None) == 0


def test_who_waits_for_a_shard_hears_how_far_it_is(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shards, "SIGN_S", 0.3)
    generate(request(model, tmp_path / "run"), lambda *_: None)
    assert "drawing answers: 0 of 3 shards, after 0:0" in capsys.readouterr().out


def test_a_killed_process_leaves_what_it_has_finished(model: Path, tmp_path: Path) -> None:
    asked = request(model, tmp_path / "run", new_tokens=60)
    made: list[int] = []

    def kill(shard: int, file: Path) -> None:
        made.append(shard)
        for child in psutil.Process().children():
            if "launchers.rejection.generation" in child.cmdline():
                child.send_signal(signal.SIGKILL)

    with pytest.raises(RuntimeError, match=r"was ended by SIGKILL \(9\), [12] of 3 shards are missing"):
        generate(asked, kill)
    finished = list(made)
    assert finished
    generate(asked, lambda shard, _: made.append(shard))
    assert sorted(made) == [0, 1, 2]
    assert made[: len(finished)] == finished
