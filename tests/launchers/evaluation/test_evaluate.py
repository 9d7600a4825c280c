"""Held-out losses and sample answers of two models, measured in a separate process."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from estimator.errors import UserError
from launchers.base.request_process import read_request, write_request
from launchers.dataset import prepared
from launchers.dataset.render import load_tokenizer
from launchers.evaluation.evaluate import EvaluationRequest, _generate_answers, evaluate
from launchers.evaluation.loading import load_model
from launchers.models import tiny_llama
from launchers.settings import Settings
from tests.lab.configs import config
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs

MODULE = sys.modules["launchers.evaluation.evaluate"]


def rows() -> list[prepared.Row]:
    generator = np.random.default_rng(0)
    conversations = []
    for length in (30, 7, 12, 7, 25, 3):
        tokens = generator.integers(0, 2000, length).astype(np.int32)
        labels = tokens.copy()
        labels[: length // 2] = prepared.IGNORE
        conversations.append(
            prepared.Row(tokens=tokens, labels=labels, lengths=np.array([length], dtype=np.int32))
        )
    return conversations


def hold_out(folder: Path) -> Path:
    info = {"seq_len": 64, "pad_id": 2, "vocab_size": tiny_llama.VOCAB_SIZE}
    runs.make_data(folder / "heldout", rows(), batch=1, steps=len(rows()), **info)
    questions = [{"prompt": f"What does function {n} do?", "reference": f"Answer {n}."} for n in range(4)]
    (folder / "heldout.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**tiny_llama.CONFIG, "num_hidden_layers": 1}
    return tiny_llama.make(tmp_path_factory.mktemp("base"), config=config)


@pytest.fixture(scope="module")
def finetuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model with another output head."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("finetuned")
    shutil.copytree(base, folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][::-1].copy()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def loss_one_by_one(folder: Path) -> float:
    from transformers import AutoModelForCausalLM

    return loss_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def loss_of(model: Any) -> float:
    model.eval()
    total, count = 0.0, 0
    for row in rows():
        labels = torch.tensor(row.labels[1:]).long()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(row.tokens).long()[None]).logits[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        count += int((labels >= 0).sum())
    return total / count


def request(base: Path, finetuned: Path, data: Path, work: Path) -> EvaluationRequest:
    return EvaluationRequest(
        base_dir=base,
        model_dir=finetuned,
        data_dir=data,
        work_dir=work,
        settings=config(),
        generations=2,
        max_new_tokens=4,
        device="cpu",
        timeout_s=240,
    )


@pytest.mark.slow
def test_both_models_are_evaluated_over_all_labels_and_answer_prompts(
    tmp_path: Path, base: Path, finetuned: Path
) -> None:
    with ranks.forked_processes(MODULE):
        result = evaluate(request(base, finetuned, hold_out(tmp_path / "data"), tmp_path / "work"))
    assert result.base.loss == pytest.approx(loss_one_by_one(base), rel=1e-5)
    assert result.finetuned.loss == pytest.approx(loss_one_by_one(finetuned), rel=1e-5)
    assert result.base.rows == 6
    assert [answer.reference for answer in result.answers] == ["Answer 0.", "Answer 1."]
    assert all(answer.base != answer.finetuned for answer in result.answers)
    assert (result.device, result.precision) == ("cpu", "fp32")


@pytest.mark.slow
def test_an_adapter_that_cannot_be_merged_is_evaluated_on_its_base(tmp_path: Path, base: Path) -> None:
    """A LLaMA-Adapter v2 with open gates."""
    from transformers import AutoModelForCausalLM

    from launchers.engines.loop import adapter_v2

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    shape = adapter_v2.AdapterV2(prompt_length=4, start_layer=1)
    torch.manual_seed(0)
    adapter_v2.insert(model, shape)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.2)
    adapter = tmp_path / "adapter"
    adapter_v2.save({name: each.detach() for name, each in trained.items()}, shape, adapter)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, adapter / name)
    with ranks.forked_processes(MODULE):
        result = evaluate(request(base, adapter, hold_out(tmp_path / "data"), tmp_path / "work"))
    assert result.base.loss == pytest.approx(loss_one_by_one(base), rel=1e-5)
    assert result.finetuned.loss == pytest.approx(loss_of(model), rel=1e-5)
    assert abs(result.finetuned.loss - result.base.loss) > 1e-3
    assert len(result.answers) == 2


@pytest.mark.slow
def test_an_export_that_does_not_load_is_a_user_error(tmp_path: Path, base: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(base, broken)
    os.truncate(broken / "model.safetensors", 1000)
    with ranks.forked_processes(MODULE), pytest.raises(UserError, match=f"evaluation of {broken} failed"):
        evaluate(request(base, broken, hold_out(tmp_path / "data"), tmp_path / "work"))


def test_an_evaluation_that_exceeds_its_time_limit_is_ended(tmp_path: Path, base: Path) -> None:
    short = dataclasses.replace(request(base, base, tmp_path, tmp_path / "work"), timeout_s=0.2)
    with pytest.raises(UserError, match=r"within 0\.2 s"):
        evaluate(short)
    assert not any("launchers.evaluation" in " ".join(each.cmdline()) for each in psutil.Process().children())


@pytest.mark.slow
def test_without_held_out_rows_the_export_is_loaded_and_progress_is_printed(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(MODULE, "PROGRESS_INTERVAL_S", 0.3)
    (tmp_path / "data").mkdir()
    result = evaluate(request(base, base, tmp_path / "data", tmp_path / "work"))
    assert (result.base, result.finetuned, result.answers) == (None, None, ())
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evaluating: ")]
    assert len(lines) >= 3
    assert lines[0].startswith("evaluating: loading, 0:0")


def test_a_request_survives_json(tmp_path: Path) -> None:
    evaluation_request = request(tmp_path / "a", tmp_path / "b", tmp_path / "c", tmp_path / "work")
    path = write_request(tmp_path / "work" / "request.json", evaluation_request)
    assert read_request(EvaluationRequest, path) == evaluation_request


def test_prompts_of_different_lengths_get_the_same_answers_in_a_batch_as_alone(base: Path) -> None:
    model = load_model(base, base, "cpu", "fp32")
    texts = ["Return", "What does the function json.loads do in Python?", "Open a file", "x " * 200]
    prompts = [{"prompt": text} for text in texts]
    tokenizer = load_tokenizer(base, Settings())
    together = _generate_answers(model, tokenizer, prompts, 8)
    assert together == [_generate_answers(model, tokenizer, [prompt], 8)[0] for prompt in prompts]
