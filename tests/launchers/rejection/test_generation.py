"""Answers generated in shards: reproducible by seed, and none generated twice."""

from __future__ import annotations

import json
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
from launchers.rejection.generation import GenerationRequest, generate, main
from launchers.settings import Settings
from launchers.settings.sections import Rejection

CHATS = [
    Conversation(
        messages=(
            Message(role="user", content=" ".join(["word"] * (1 + index % 5)) + f" {index}"),
            Message(role="assistant", content="x"),
        )
    )
    for index in range(40)
]


WORKER = "tests.launchers.rejection.one_shard"
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 32,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**tiny_llama.CONFIG, **SMALL, "num_hidden_layers": 1}
    return tiny_llama.make(tmp_path_factory.mktemp("model"), config=config)


def request(
    model: Path, folder: Path, *, node: int = 0, nodes: int = 1, **rejection: Any
) -> GenerationRequest:
    folder.mkdir(exist_ok=True)
    settings = Settings(rejection=Rejection(answers=4, max_new_tokens=5, **rejection))
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
def finished_request(model: Path, tmp_path_factory: pytest.TempPathFactory) -> GenerationRequest:
    """A request of one node whose shards are generated."""
    generation = request(model, tmp_path_factory.mktemp("runs") / "whole")
    main(generation.save())
    return generation


def test_a_missing_shard_is_generated_again_with_the_same_answers(
    finished_request: GenerationRequest,
) -> None:
    before = {path.name: path.read_text() for path in finished_request.shards_dir.iterdir()}
    (finished_request.shards_dir / rows.shard_name(1)).unlink()
    main(finished_request.save())
    assert {path.name: path.read_text() for path in finished_request.shards_dir.iterdir()} == before
    answers = [
        each for path in sorted(finished_request.shards_dir.iterdir()) for each in rows.read_answers(path)
    ]
    assert sorted(each.index for each in answers) == list(range(40))
    assert all(len(each.answers) == 4 for each in answers)
    assert all(1 <= answer.tokens <= 5 for each in answers for answer in each.answers)
    assert any(len({answer.text for answer in each.answers}) > 1 for each in answers), "answers are sampled"


def test_two_nodes_generate_the_same_shards_as_one_node(
    model: Path, tmp_path: Path, finished_request: GenerationRequest
) -> None:
    second = request(model, tmp_path / "second", node=1, nodes=2)
    main(second.save())
    assert second.count() == 3
    name = rows.shard_name(1)
    assert [path.name for path in second.shards_dir.iterdir()] == [name], "node 0 has shards 0 and 2"
    assert (second.shards_dir / name).read_text() == (finished_request.shards_dir / name).read_text()
    assert generate(request(model, tmp_path / "idle", node=3, nodes=4), lambda *_: None) == 0


def test_a_killed_process_keeps_its_finished_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shards, "POLL_S", 0.01)
    monkeypatch.setattr(shards, "PROGRESS_INTERVAL_S", 0.05)
    (tmp_path / "request.json").write_text(json.dumps(str(tmp_path)))
    finished: list[str] = []

    def kill(_: int, file: Path) -> None:
        finished.append(file.name)
        for child in psutil.Process().children():
            if WORKER in child.cmdline():
                child.send_signal(signal.SIGKILL)

    options = {"name": "sampling answers", "device": "cpu", "limit_s": 60, "on_shard": kill}
    with pytest.raises(RuntimeError, match=r"was ended by SIGKILL \(9\), 2 of 3 shards are missing"):
        shards.make_shards(WORKER, tmp_path / "request.json", tmp_path, range(3), **options)
    assert re.search(r"0 of 3 shards\b", capsys.readouterr().out)
    assert finished == [rows.shard_name(0)]
    assert (tmp_path / finished[0]).is_file()
