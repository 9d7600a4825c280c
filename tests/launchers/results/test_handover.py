"""A finished model answers as in the example on its card, from its folder alone."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from estimator.models import resolve
from launchers import engines
from launchers.dataset import prepare
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Message
from launchers.engines.reward_head import as_trained
from launchers.gang.job import TrainJob
from launchers.models import causal, tiny_llama
from launchers.results import gguf, handover
from launchers.run import preparation
from launchers.settings import build
from tests.conftest import write_sums
from tests.launchers.engines.loop import runs

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] + '\n' + m['content'] }}<|eot_id|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATS = [
    Conversation(messages=(Message(role="user", content="Hi"), Message(role="assistant", content="Hello"))),
    Conversation(
        messages=(Message(role="user", content="Bye"), Message(role="assistant", content="So long"))
    ),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model without a chat template and end-of-turn token."""
    folder = tiny_llama.make(tmp_path_factory.mktemp("models") / "base")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    config["eos_token"] = tiny_llama.EOS
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def job_of(base: Path, work: Path, values: dict[str, Any], rows: list[Any] | None = None) -> TrainJob:
    """Return a job with prepared data."""
    settings = build({"engine": "fsdp2", "global_batch_size": 1, "max_steps": 1} | values)
    model_dir = as_trained(base, settings, work)
    samples = CHATS if rows is None else rows
    prepare.prepare(samples, model_dir, settings, 128, work / "data")
    job = runs.make_job(work / "job", model_dir, work / "data", steps=1, settings=settings.model_dump())
    return dataclasses.replace(job, settings=job.settings, model=resolve(str(base)))


def handed_over(base: Path, work: Path, values: dict[str, Any], rows: list[Any] | None = None) -> Path:
    """Return the export of a job without training: the trained weights are those of the base."""
    job = job_of(base, work, values, rows)
    (job.output_dir / "model").mkdir(parents=True)
    for path in job.model_dir.glob("*.safetensors"):
        shutil.copyfile(path, job.output_dir / "model" / path.name)
    handover.collect(job, work / "out")
    return engines.result_of(work / "out")


def run_the_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the example on the model card of a folder; return its output."""
    lines = (folder / handover.PAGE).read_text().partition(handover.HEADING + "\n\n")[2]
    lines = lines.partition("\n\nA conversation")[0].partition("\n\n## ")[0]
    code = "\n".join(line.removeprefix("    ") for line in lines.splitlines())
    script = folder.parent / "page.py"
    script.write_text(code.replace("this/folder", str(folder)))
    capsys.readouterr()
    runpy.run_path(str(script))
    return capsys.readouterr().out


@pytest.mark.parametrize("template", [None, CHATML], ids=["built-in", "settings"])
def test_the_exported_tokenizer_has_the_chat_template_used_in_training(
    base: Path, tmp_path: Path, template: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    folder = handed_over(base, tmp_path, {"chat_template": template})
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Name a prime number."}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert shown.endswith("### Response:\n" if template is None else "<|im_start|>assistant\n")
    page = (folder / handover.PAGE).read_text()
    assert "\n".join(f"    {line}" for line in shown.split("\n")) in page
    assert "convert_hf_to_gguf.py this/folder" in page
    assert handover.gguf_command(folder) == (
        f"python llama.cpp/convert_hf_to_gguf.py {folder} --outfile model.gguf"
    )
    end = tokenizer.eos_token if template is None else "<|eot_id|>"
    config = json.loads((folder / "generation_config.json").read_text())
    assert tokenizer.convert_tokens_to_ids(end) in config["eos_token_id"]
    assert run_the_page(folder, capsys).strip()


WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.tool_calls | tojson if m.tool_calls else m.content }}<|eot_id|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FUNCTION = {"name": "add", "arguments": '{"a": 1, "b": 2}'}
CALLS = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": FUNCTION}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "3."},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds two numbers."}}]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("my sums.csv", {}),
        ("tools.jsonl", {"chat_template": WITH_TOOLS}),
        ("book é.txt", {"task": "pretrain"}),
    ],
)
def test_a_model_trained_on_any_data_format_runs_the_example_of_its_model_card(
    base: Path, tmp_path: Path, name: str, values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "my data" / name
    data.parent.mkdir()
    if name == "tools.jsonl":
        data.write_text(json.dumps({"messages": CALLS, "tools": TOOLS}) + "\n")
    elif name == "book é.txt":
        data.write_text("Once upon a time there was a cat. " * 40, encoding="utf-8")
    else:
        write_sums(data)
    rows, _ = preparation.read_data(build({"dataset": str(data)} | values), tmp_path / "data")
    folder = handed_over(base, tmp_path, values, list(rows))
    page = (folder / handover.PAGE).read_text()
    chats = name != "book é.txt"
    assert ("template" in page) == chats
    assert ("chat_template" in json.loads((folder / "tokenizer_config.json").read_text())) == chats
    printed = run_the_page(folder, capsys)
    assert printed.strip() if chats else printed.startswith("The beginning of a text")


def test_the_example_on_the_card_of_a_reward_model_prints_a_score(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launchers.dataset import preferences

    rows = list(preferences.from_conversations(CHATS))
    folder = handed_over(base, tmp_path, {"task": "reward"}, rows)
    assert not (folder / "generation_config.json").exists()
    float(run_the_page(folder, capsys))


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        {"method": "lora"},
        pytest.param({"method": "qlora"}, marks=pytest.mark.nightly),
        {"method": "lora", "task": "reward"},
        {"method": "dora", "new_tokens": ["<new>"], "lora": {"targets": ["q_proj"]}},
    ],
    ids=lambda values: "-".join(map(str, values.values()))[:20],
)
def test_the_example_on_the_card_of_an_adapter_loads_it_on_its_base(
    base: Path, tmp_path: Path, values: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from launchers.dataset import preferences
    from launchers.engines.loop.model import made_trainable

    values = values | {"export": {"adapter_only": True}}
    reward = values.get("task") == "reward"
    job = job_of(base, tmp_path, values, list(preferences.from_conversations(CHATS)) if reward else CHATS)
    network = made_trainable(causal.load(job.model_dir, dtype=torch.float32), job)
    network.save_pretrained(job.output_dir / "adapter", save_embedding_layers=False)
    handover.collect(job, tmp_path / "out")
    folder = engines.result_of(tmp_path / "out")
    assert folder.name == "adapter"
    command = handover.gguf_command(folder) or ""
    plain = values["method"] != "dora" and not reward
    assert (f"convert_lora_to_gguf.py --base {base} {folder}" in command) == plain
    printed = run_the_page(folder, capsys).strip()
    assert float(printed) == 0.0 if reward else printed


def test_paths_with_spaces_are_quoted_in_the_gguf_command(base: Path, tmp_path: Path) -> None:
    spaced = Path(shutil.copytree(base, tmp_path / "my base"))
    adapter = tmp_path / "my run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    command = gguf.command(adapter, spaced, str(spaced)) or ""
    (adapter / handover.PAGE).write_text(f"## GGUF, for llama.cpp\n\n    {command}\n")
    arguments = shlex.split(handover.gguf_command(adapter) or "")
    assert arguments[2:5] == ["--base", str(spaced), str(adapter)]


def test_gguf_architectures_exist_in_transformers_and_others_have_no_command(
    base: Path, tmp_path: Path
) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert gguf.supported_architectures() <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GPTJForCausalLM"]}))
    assert gguf.command(tmp_path, base, str(base)) is None
