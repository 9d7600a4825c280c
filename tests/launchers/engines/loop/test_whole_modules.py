"""Embeddings, heads and norms trained fully next to adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from estimator.models import hf_config
from estimator.setup import Setup
from launchers import engines
from launchers.engines.loop import export, model, whole_modules
from launchers.gang.job import TrainJob
from tests.launchers.engines.loop import runs
from tests.launchers.engines.loop.test_adapter_v2 import TOKENS, moved, network, trained

EVERYTHING = ("embed_tokens", "lm_head", "norms")
STEPS = 6
CLOSE = 2e-6  # relative; the order of a sum of fp32 differs between layouts
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"engine": "fsdp2", "sharding": "none", "world": 1, "micro": 4},
    "fsdp": {"engine": "fsdp2", "sharding": "fsdp"},
    "zero2": {"sharding": "zero2"},
    "zero3": {"sharding": "zero3"},
}


def job(folder: Path, chosen: tuple[str, ...]) -> TrainJob:
    settings = {"method": "lora", "lora": {"rank": 4, "modules_to_save": chosen}}
    return runs.make_job(folder, folder, folder, steps=1, settings=settings)


@pytest.mark.parametrize(
    ("kind", "chosen", "tied"),
    [
        ("Llama", ("embed_tokens",), False),
        ("Llama", ("lm_head",), True),
        ("Qwen3", ("norms",), False),  # which has norms of queries and keys, too
        ("Qwen3", EVERYTHING, True),
    ],
)
def test_trained_modules_are_counted_exactly_merged_and_loaded_by_peft(
    tmp_path: Path, kind: str, chosen: tuple[str, ...], tied: bool
) -> None:
    base = network(kind, tie_word_embeddings=tied)
    base.save_pretrained(tmp_path / "base")
    values = json.loads((tmp_path / "base" / "config.json").read_text())
    adapted = moved(model.made_trainable(base, job(tmp_path, chosen)))
    count = sum(parameter.numel() for parameter in trained(adapted).values())
    setup = Setup(
        model=hf_config.to_spec(values, kind),
        engine="fsdp2",
        method="lora",
        lora_rank=4,
        trained_modules=chosen,
    )
    assert count == setup.trainable_parameters

    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    export.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    (tmp_path / "merged" / "config.json").write_text(json.dumps(values))
    with torch.no_grad():
        expected_logits = adapted.eval()(TOKENS).logits
        assert torch.allclose(runs.load(tmp_path / "merged")(TOKENS).logits, expected_logits, atol=1e-5)
        resumed = PeftModel.from_pretrained(runs.load(tmp_path / "base"), str(tmp_path / "adapter")).eval()
        assert torch.allclose(resumed(TOKENS).logits, expected_logits, atol=1e-5)
        assert not torch.allclose(runs.load(tmp_path / "base")(TOKENS).logits, expected_logits, atol=1e-1)


def test_names_of_trained_modules_are_the_shortest_unambiguous_suffixes() -> None:
    """PEFT matches suffixes: "norm" would also match the query and key norms of Qwen 3."""
    llama, qwen3 = (
        whole_modules.peft_options(network(kind), EVERYTHING)["modules_to_save"]
        for kind in ("Llama", "Qwen3")
    )
    blocks = ["embed_tokens", "input_layernorm", "lm_head", "post_attention_layernorm"]
    assert sorted(llama) == sorted([*blocks, "norm"])
    assert sorted(qwen3) == sorted([*blocks, "model.norm"])


def make_job(work: Path, folder: Path, data: Path, layout: str, **options: Any) -> TrainJob:
    settings = {"method": "lora", "lora": {"modules_to_save": EVERYTHING}, "optimizer": {"lr": 2e-2}}
    return runs.make_job(work, folder, data, steps=STEPS, settings=settings, **LAYOUTS[layout], **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("llama", marks=pytest.mark.nightly), "tied"])
def test_fully_trained_modules_have_equal_losses_with_every_sharding_and_resume(
    tmp_path: Path, data: Path, kind: str
) -> None:
    folder = runs.make_model(tmp_path / "model", kind)
    engine_losses = {}
    for layout in LAYOUTS:
        done = make_job(tmp_path / layout, folder, data, layout, checkpoint_every=3)
        engine_losses[layout] = runs.losses(runs.run(done))
        out = tmp_path / f"{layout}-out"
        engines.get(done.plan.engine).collect(done, out)
        with torch.no_grad():
            merged = runs.load(out / "model")(TOKENS).logits
            adapted = PeftModel.from_pretrained(runs.load(folder), str(out / "adapter")).eval()(TOKENS).logits
            assert torch.allclose(merged, adapted, atol=1e-5), layout
            assert not torch.allclose(runs.load(folder)(TOKENS).logits, merged, atol=1e-2)
    resumed_steps = runs.run(runs.resumed(done, tmp_path / "again", 3))  # ZeRO-3, the last layout
    assert runs.losses(resumed_steps) == engine_losses[layout][3:]
    for layout, losses in engine_losses.items():
        assert losses == pytest.approx(engine_losses["one"], rel=CLOSE), layout
    assert engine_losses["one"][-1] < engine_losses["one"][0] - 0.5


@pytest.mark.slow
@pytest.mark.nightly
def test_fully_trained_modules_are_kept_in_fp32_under_mixed_precision(tmp_path: Path, data: Path) -> None:
    from safetensors.torch import load_file

    folder = runs.make_model(tmp_path / "model")
    plain, mixed = (
        make_job(tmp_path / name, folder, data, "fsdp", precision=name) for name in ("fp32", "bf16-mixed")
    )
    losses = [runs.losses(runs.run(each)) for each in (plain, mixed)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    tensors = load_file(mixed.output_dir / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
