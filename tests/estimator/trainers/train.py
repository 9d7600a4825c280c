"""Train a tiny Llama for three steps with another trainer, as a plan says: train.py TRAINER PLAN.json OUT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from estimator.plan import Plan

STEPS, VOCABULARY = 3, 64


def network() -> Any:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def rows(plan: Plan) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    count = STEPS * plan.layout.global_batch_size
    ids = torch.randint(3, VOCABULARY, (count, plan.layout.seq_len), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids]


def with_transformers(plan: Plan, out: Path) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(out.parent),
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        **plan.to_transformers(),
    )
    trainer = Trainer(model=network(), args=arguments, train_dataset=rows(plan))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_trl(plan: Plan, out: Path) -> list[float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    arguments = SFTConfig(
        output_dir=str(out.parent),
        max_steps=STEPS,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        **plan.to_transformers(sft=True),
    )
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="w1", pad_token="w2")
    texts = [" ".join(f"w{number}" for number in row["input_ids"].tolist()) for row in rows(plan)]
    trainer = SFTTrainer(
        model=network(),
        args=arguments,
        train_dataset=Dataset.from_list([{"text": text} for text in texts]),
        processing_class=tokenizer,
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_accelerate(plan: Plan, out: Path) -> list[float]:
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    values = plan.to_accelerate()
    for name, kind in (
        ("fsdp_plugin", FullyShardedDataParallelPlugin),
        ("deepspeed_plugin", DeepSpeedPlugin),
    ):
        if name in values:
            values[name] = kind(**values[name])
    accelerator = Accelerator(**values)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader: Any = torch.utils.data.DataLoader(rows(plan), batch_size=plan.layout.micro_batch_size)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def with_deepspeed(plan: Plan, out: Path) -> list[float]:
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled, which takes minutes

    model = network()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config=plan.to_deepspeed()
        | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False},
    )
    own = rows(plan)[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    losses = []
    size = plan.layout.micro_batch_size
    for start in range(0, len(own), size):
        batch = torch.stack([row["input_ids"] for row in own[start : start + size]])
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


TRAINERS = {
    "transformers": with_transformers,
    "trl": with_trl,
    "accelerate": with_accelerate,
    "deepspeed": with_deepspeed,
}


def main() -> None:
    plan, out = Plan.from_json(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
    losses = TRAINERS[sys.argv[1]](plan, out)
    if os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
