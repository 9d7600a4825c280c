import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from estimator.errors import UserError
from launchers.dataset import drawn_shapes
from launchers.models import tiny_sdxl

diffusers = pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_sdxl.make(tmp_path_factory.mktemp("models") / "tiny-sdxl")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> Any:
    return diffusers.StableDiffusionXLPipeline.from_pretrained(folder)


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_diffusers_generates_an_image_that_depends_on_the_prompt_and_the_seed(pipeline: Any) -> None:
    def image(prompt: str, seed: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        size = {"height": 64, "width": 64, "num_inference_steps": 2}
        return torch.from_numpy(pipeline(prompt, generator=generator, output_type="np", **size).images)

    pipeline.set_progress_bar_config(disable=True)
    first = image("a large red circle", 0)
    assert first.shape == (1, 64, 64, 3)
    assert torch.equal(first, image("a large red circle", 0))
    assert not torch.equal(first, image("a small blue ring", 0))
    assert not torch.equal(first, image("a large red circle", 1))


def test_the_tiny_pipeline_has_the_layout_of_stable_diffusion_xl(folder: Path, pipeline: Any) -> None:
    assert {path.name for path in folder.iterdir()} == {
        *("model_index.json", "unet", "vae", "text_encoder", "text_encoder_2"),
        *("tokenizer", "tokenizer_2", "scheduler"),
    }
    assert not list(folder.rglob("*.bin"))
    written = json.loads((folder / "unet" / "config.json").read_text())
    assert {name: written[name] for name in tiny_sdxl.CONFIG} == tiny_sdxl.CONFIG
    assert (pipeline.vae_scale_factor, pipeline.vae.config.scaling_factor) == (8, 0.13025)
    assert sum(weight.numel() for weight in pipeline.unet.parameters()) == 1_360_740


def test_the_tokenizer_has_tokens_for_caption_words_and_encodes_any_text(pipeline: Any) -> None:
    tokenizer = pipeline.tokenizer
    caption = next(iter(drawn_shapes.draw_images(1)))[0]
    assert tokenizer.tokenize(caption) == [f"{word}</w>" for word in caption.split()]
    for text in ("Zebra № 5, naïve 🙂", caption):
        ids = tokenizer(text, padding="max_length", max_length=77, truncation=True).input_ids
        assert len(ids) == 77
        assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
        ends = ids.index(tokenizer.eos_token_id)
        assert tokenizer.unk_token_id not in ids[1:ends]
        assert tokenizer.decode(ids[1:ends]).replace(" ", "") == text.lower().replace(" ", "")
    assert tokenizer(caption.upper()).input_ids == tokenizer(caption).input_ids
    assert pipeline.text_encoder.config.eos_token_id == tokenizer.eos_token_id  # its output is pooled there


def test_a_seed_gives_identical_files_and_another_seed_different_ones(folder: Path, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    second_pipeline, other = tiny_sdxl.make(tmp_path / "again"), tiny_sdxl.make(tmp_path / "other", seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert hashes(second_pipeline) == hashes(folder)
    changed = {name for name, value in hashes(other).items() if value != hashes(folder)[name]}
    assert {name.partition("/")[0] for name in changed} == {"unet", "vae", "text_encoder", "text_encoder_2"}


def test_a_tiny_pipeline_is_written_completely_or_not_at_all_and_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "model_index.json").write_text("{}")
    assert tiny_sdxl.make(tmp_path / "made") == tmp_path / "made"
    assert (tmp_path / "made" / "model_index.json").read_text() == "{}"

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(diffusers.StableDiffusionXLPipeline, "save_pretrained", full)
    with pytest.raises(UserError, match="No space left"):
        tiny_sdxl.make(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
