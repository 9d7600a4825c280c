"""New tokens of a model: tokenizer, files, and trained embeddings."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from estimator.errors import UserError
from launchers import engines, settings
from launchers.dataset import prepare
from launchers.dataset.rows import Conversation
from launchers.engines.new_tokens import with_new_tokens
from launchers.models import tiny_llama
from tests.launchers.engines.loop import runs

NEW = ["<tool>", "</tool>"]
SETTINGS = settings.build({"method": "lora", "engine": "fsdp2", "new_tokens": NEW})
TEXT = "call <tool>clock</tool> now"
KNOWN = tiny_llama.VOCAB_SIZE
TOKENS = torch.arange(3, 33)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("base") / "tiny")


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_new_embedding_rows_are_the_mean_of_all_others_and_the_base_is_unchanged(
    tmp_path: Path, base: Path
) -> None:
    before = sums(base)
    folder = with_new_tokens(base, SETTINGS, tmp_path / "new")
    assert sums(base) == before
    ids = tokenizer(folder)(TEXT).input_ids
    assert [number for number in ids if number >= KNOWN] == [KNOWN, KNOWN + 1]
    assert max(tokenizer(base)(TEXT).input_ids) < KNOWN
    grown, old = load(folder), load(base)
    assert grown.config.vocab_size == KNOWN + 2
    for matrix, plain in (
        (grown.get_input_embeddings(), old.get_input_embeddings()),
        (grown.get_output_embeddings(), old.get_output_embeddings()),
    ):
        assert torch.equal(matrix.weight[:KNOWN], plain.weight)
        assert torch.allclose(matrix.weight[KNOWN:], plain.weight.mean(dim=0), atol=1e-7)
    with torch.no_grad():
        assert torch.equal(grown(TOKENS).logits[..., :KNOWN], old(TOKENS).logits)
    assert with_new_tokens(base, SETTINGS, tmp_path / "new") == folder


def test_no_model_copy_is_written_without_new_tokens(tmp_path: Path, base: Path) -> None:
    plain = SETTINGS.model_copy(update={"new_tokens": ()})
    assert with_new_tokens(base, plain, tmp_path / "new") == base
    assert not (tmp_path / "new").exists()


def test_files_without_embeddings_are_linked_and_existing_tokens_keep_their_rows(
    tmp_path: Path, base: Path
) -> None:
    load(base).save_pretrained(tmp_path / "sharded", max_shard_size="5MB")
    tokenizer(base).save_pretrained(tmp_path / "sharded")
    with_known_token = SETTINGS.model_copy(update={"new_tokens": (tiny_llama.EOT, *NEW)})
    folder = with_new_tokens(tmp_path / "sharded", with_known_token, tmp_path / "new")
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    linked = [path.name for path in files if path.samefile(folder / path.name)]
    assert 0 < len(linked) < len(files)
    end = tokenizer(base).convert_tokens_to_ids(tiny_llama.EOT)
    assert tokenizer(folder).convert_tokens_to_ids(tiny_llama.EOT) == end
    grown = load(folder).get_input_embeddings().weight
    assert torch.equal(grown[end], load(base).get_input_embeddings().weight[end])
    assert len(grown) == KNOWN + 2


def test_new_tokens_use_the_padding_of_the_vocabulary_and_start_as_the_mean(
    tmp_path: Path, base: Path
) -> None:
    padded = load(base)
    padded.resize_token_embeddings(KNOWN + 64)
    padded.save_pretrained(tmp_path / "padded")
    tokenizer(base).save_pretrained(tmp_path / "padded")
    grown = load(with_new_tokens(tmp_path / "padded", SETTINGS, tmp_path / "new"))
    weight = grown.get_input_embeddings().weight
    assert len(weight) == grown.config.vocab_size == KNOWN + 64
    assert torch.allclose(weight[KNOWN], weight[:KNOWN].mean(dim=0), atol=1e-7)


def test_embeddings_under_another_tensor_name_are_refused(tmp_path: Path, base: Path) -> None:
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(base / "model.safetensors")
    tensors["output.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    (other / "config.json").write_text((base / "config.json").read_text())
    tokenizer(base).save_pretrained(other)
    with pytest.raises(UserError, match=r"output\.weight"):
        with_new_tokens(other, SETTINGS, tmp_path / "new")


def test_new_tokens_change_the_fingerprint_of_the_prepared_data(tmp_path: Path, base: Path) -> None:
    texts = [Conversation(text=f"{TEXT} {number}") for number in range(16)]
    plain = SETTINGS.model_copy(update={"new_tokens": ()})
    infos = [
        prepare.prepare(texts, base, chosen, 64, tmp_path / str(number))
        for number, chosen in enumerate((plain, SETTINGS))
    ]
    assert infos[1].vocab_size == infos[0].vocab_size + 2
    assert infos[0].fingerprint != infos[1].fingerprint
    assert infos[1].tokens < infos[0].tokens


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param("full", marks=pytest.mark.nightly), "lora"])
def test_embeddings_of_new_tokens_are_trained_and_exported(tmp_path: Path, base: Path, method: str) -> None:
    """Every sharding gives the same; model, adapter and tokenizer have the new vocabulary."""
    folder = with_new_tokens(base, SETTINGS, tmp_path / "new")
    texts = [Conversation(text=f"{TEXT} {number}") for number in range(8)]
    batches = {"global_batch_size": 4, "epochs": 2}
    chosen = {"method": method, "new_tokens": NEW, "optimizer": {"lr": 5e-3}, **batches}
    prepare.prepare(texts, folder, settings.build({**chosen, "engine": "fsdp2"}), 64, tmp_path / "data")
    layouts: dict[str, Any] = {
        "fsdp2": {"engine": "fsdp2", "sharding": "fsdp"},
        "zero3": {"sharding": "zero3"},
    }
    losses = {}
    for name, layout in layouts.items():
        job = runs.make_job(tmp_path / name, folder, tmp_path / "data", steps=4, settings=chosen, **layout)
        losses[name] = runs.losses(runs.run(job))
        out = tmp_path / f"{name}-out"
        engines.get(job.plan.engine).collect(job, out)
        model = load(out / "model")
        assert model.config.vocab_size == KNOWN + 2
        assert tokenizer(out / "model").convert_tokens_to_ids(NEW) == [KNOWN, KNOWN + 1]
        for trained, begun in (
            (model.get_input_embeddings().weight, load(folder).get_input_embeddings().weight),
            (model.get_output_embeddings().weight, load(folder).get_output_embeddings().weight),
        ):
            assert not np.allclose(trained[KNOWN:].detach(), begun[KNOWN:].detach(), atol=1e-4)
        if method == "lora":
            from peft import PeftModel

            adapted = PeftModel.from_pretrained(load(folder), str(out / "adapter")).eval()
            ids = torch.tensor([[5, KNOWN, 7, KNOWN + 1]])
            with torch.no_grad():
                assert torch.allclose(adapted(ids).logits, model(ids).logits, atol=1e-5)
            assert json.loads((out / "adapter" / "adapter_config.json").read_text())["modules_to_save"]
            assert len(tokenizer(out / "adapter")) == KNOWN + 2
    assert losses["fsdp2"] == pytest.approx(losses["zero3"], rel=2e-6)
    assert losses["fsdp2"][-1] < losses["fsdp2"][0]
