"""Answers drawn in shards: the same again for the same seed, and none twice."""

from __future__ import annotations

import contextlib
import io
import re
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


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[GenerationRequest, str]:
    """A run of one node to its end, and what it printed; its shards are read by several tests."""
    whole = request(model, tmp_path_factory.mktemp("runs") / "whole")
    made: list[int] = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        patch.setattr(shards, "SIGN_S", 0.3)
        assert generate(whole, lambda shard, _: made.append(shard)) == 3
    assert made == [0, 1, 2]
    return whole, output.getvalue()


def test_a_missing_shard_is_generated_again_with_the_same_answers(
    finished: tuple[GenerationRequest, str],
) -> None:
    whole, _ = finished
    made: list[int] = []
    before = {path.name: path.read_text() for path in whole.shards_dir.iterdir()}
    (whole.shards_dir / rows.shard_name(1)).unlink()
    generate(whole, lambda shard, _: made.append(shard))
    assert made == [1]
    assert {path.name: path.read_text() for path in whole.shards_dir.iterdir()} == before
    found = [each for path in sorted(whole.shards_dir.iterdir()) for each in rows.read_answers(path)]
    assert sorted(each.index for each in found) == list(range(40))
    assert all(len(each.answers) == 4 for each in found)
    assert all(1 <= answer.tokens <= 5 for each in found for answer in each.answers)
    assert any(len({answer.text for answer in each.answers}) > 1 for each in found), "answers are sampled"


def test_two_nodes_generate_the_shards_of_one_node(
    model: Path, tmp_path: Path, finished: tuple[GenerationRequest, str]
) -> None:
    whole, _ = finished
    second = request(model, tmp_path / "second", node=1, nodes=2)
    made: list[int] = []
    generate(second, lambda shard, _: made.append(shard))
    assert second.count() == 3
    assert made == [1], "node 0 has shards 0 and 2"
    name = rows.shard_name(1)
    assert (second.shards_dir / name).read_text() == (whole.shards_dir / name).read_text()
    assert generate(request(model, tmp_path / "idle", node=3, nodes=4), lambda *_: None) == 0


def test_progress_is_printed_while_a_shard_is_generated(finished: tuple[GenerationRequest, str]) -> None:
    assert re.search(r"0 of 3 shards\b", finished[1])


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
