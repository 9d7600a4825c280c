"""Vision-language models: losses compared with TRL, and runs from JSONL to an exported model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

Image = pytest.importorskip("PIL.Image")

import numpy as np  # noqa: E402

from launchers.dataset.prepared import IGNORE, Row  # noqa: E402
from launchers.dataset.render import load_tokenizer, tokenize  # noqa: E402
from launchers.dataset.rows import Conversation  # noqa: E402
from launchers.dataset.turns import IMAGE, Message  # noqa: E402
from launchers.settings import build  # noqa: E402
from tests import vision_models  # noqa: E402
from tests.launchers.engines.loop import runs  # noqa: E402

ROOT = Path(__file__).parents[4]
COLORS = {"red": (220, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 220), "white": (250, 250, 250)}
QUESTION = "Which color?"
BATCH, STEPS, RATE = 4, 10, 1e-3


def picture(color: str, width: int) -> Any:
    return Image.new("RGB", (width, 40), COLORS[color])


def conversations() -> list[Conversation]:
    parsed = []
    for width in (32, 48):
        for color in COLORS:
            file = io.BytesIO()
            picture(color, width).save(file, "PNG")
            question = Message(role="user", content=f"{IMAGE}{QUESTION}")
            answer = Message(role="assistant", content=color)
            parsed.append(Conversation(messages=(question, answer), images=(file.getvalue(),)))
    return parsed


def answer_of(folder: Path, color: str) -> str:
    """Return the answer of the exported model about an image, by transformers and the processor alone."""
    from transformers import AutoModelForImageTextToText

    processor = load_tokenizer(folder, build({"vision": "frozen"})).processor
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(
        text=[text], images=[[picture(color, 40)]], return_tensors="pt", add_special_tokens=False
    )
    model = AutoModelForImageTextToText.from_pretrained(folder)
    output = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    answer: str = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


def losses_here(model: Path, work: Path) -> list[float]:
    settings = {
        "vision": "full",
        "method": "full",
        "optimizer": {"lr": RATE, "weight_decay": 0.0},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "clip_grad_norm": None,
    }
    tokenizer = load_tokenizer(model, build({"vision": "full"}))
    rows = [
        Row(
            tokens=ids,
            labels=np.where(counted, ids, IGNORE),
            lengths=np.array([len(ids)], dtype=np.int32),
            images=[np.frombuffer(image, dtype=np.uint8) for image in conversation.images],
        )
        for (ids, counted), conversation in zip(
            tokenize(conversations(), tokenizer), conversations(), strict=True
        )
    ]
    data = runs.make_data(work / "data", rows, batch=BATCH, steps=STEPS, vocab_size=len(tokenizer))
    job = runs.make_job(
        work / "work",
        model,
        data,
        steps=STEPS,
        world=1,
        micro=2,
        accumulation=2,
        engine="fsdp2",
        sharding="none",
        settings=settings,
    )
    return runs.losses(runs.run(job))


def losses_of_trl(model: Path, work: Path) -> list[float]:
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForImageTextToText
    from trl import SFTConfig, SFTTrainer

    class InOrder(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    shown = [(color, width) for width in (32, 48) for color in COLORS]
    places = [number % len(shown) for number in range(BATCH * STEPS)]
    data = Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": QUESTION}] for _ in places],
            "completion": [[{"role": "assistant", "content": shown[place][0]}] for place in places],
            "images": [[picture(*shown[place])] for place in places],
        }
    )
    options = SFTConfig(
        output_dir=str(work),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=0.95,
        max_grad_norm=0.0,
        logging_steps=1,
        max_length=None,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = InOrder(
        model=AutoModelForImageTextToText.from_pretrained(model),
        args=options,
        train_dataset=data,
        processing_class=load_tokenizer(model, build({"vision": "full"})).processor,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_the_losses_of_ten_steps_equal_those_of_the_trl_trainer(family: str, tmp_path: Path) -> None:
    model = vision_models.make(tmp_path / family, family)
    losses_of_engine, losses_of_reference = (
        losses_here(model, tmp_path),
        losses_of_trl(model, tmp_path / "trl"),
    )
    assert len(losses_of_engine) == len(losses_of_reference) == STEPS
    assert losses_of_engine[-1] < losses_of_engine[0] - 1
    assert losses_of_engine == pytest.approx(losses_of_reference, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_vl", ["method=full", "engine=fsdp2", "optimizer.lr=3e-3"]),
        pytest.param(
            "qwen3_vl",
            ["method=lora", "vision=lora", "engine=deepspeed", "resources.gpus=2", "optimizer.lr=2e-2"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "gemma3",
            ["method=full", "engine=deepspeed", "resources.gpus=2", "optimizer.lr=3e-3"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "idefics3",
            ["method=full", "vision=full", "engine=fsdp2", "resources.gpus=2", "optimizer.lr=3e-3"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "smolvlm",
            ["method=full", "vision=full", "engine=deepspeed", "optimizer.lr=3e-3"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "smolvlm",
            ["method=lora", "vision=lora", "engine=fsdp2", "optimizer.lr=5e-3"],
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "smolvlm",
            ["method=lora", "vision=lora", "engine=deepspeed", "resources.gpus=2", "optimizer.lr=5e-3"],
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_run_on_rows_with_images_exports_a_model_that_answers_about_images(
    family: str, options: list[str], tmp_path: Path
) -> None:
    model = vision_models.make(tmp_path / family, family)
    rows = []
    for width in (32, 40, 48, 56):
        for color in COLORS:
            name = f"{color}-{width}.png"
            picture(color, width).save(tmp_path / name)
            parts = [{"type": "image", "image": name}, {"type": "text", "text": QUESTION}]
            answer = {"role": "assistant", "content": color}
            rows.append({"messages": [{"role": "user", "content": parts}, answer]})
    for name, chosen in (("train", rows), ("held-out", rows[: len(COLORS)])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    values = [
        f"model={model}",
        "dataset=train.jsonl",
        "evaluation.dataset=held-out.jsonl",
        f"evaluation.generations={len(COLORS)}",
        "resources.device=cpu",
        "max_steps=60",
        "global_batch_size=8",
        *options,
    ]
    command = [sys.executable, "-m", "launchers", "--output", "out", "--no-calibration"]
    done = subprocess.run(
        [*command, *(word for value in values for word in ("--set", value))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FINETUNE_WORK_DIR": str(tmp_path / "work")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"0 of {len(COLORS)} before, {len(COLORS)} of {len(COLORS)} after" in done.stdout
    assert [answer_of(tmp_path / "out" / "model", color) for color in ("red", "blue")] == ["red", "blue"]
