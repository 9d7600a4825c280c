"""Training of a UNet: losses compared with the diffusers training script, and exports."""

from __future__ import annotations

import base64
import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")

import torch
from safetensors.torch import load_file
from torch.nn import functional

from launchers import engines
from launchers.dataset.prepared import Prepared
from launchers.engines import _pipeline_layout
from launchers.engines._schedule import lr_factor
from launchers.engines.loop.images import QUARTERS, LatentBatch, TextToImage
from launchers.evaluation import image_evaluation
from launchers.gang.job import TrainJob
from launchers.images.prepared import PreparedImages
from launchers.report.telemetry import Evaluated, EvaluationImages, Follower
from tests.launchers.engines.loop import runs
from tests.launchers.images.runs import Prepared as PreparedRun
from tests.launchers.images.runs import prepared

pytestmark = pytest.mark.slow
CLOSE = 1e-4


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> PreparedRun:
    return prepared(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def trained(images: PreparedRun) -> TrainJob:
    """A finished full run in one process."""
    job = images.job("full")
    runs.run(job)
    return job


@pytest.fixture(scope="module")
def adapted(images: PreparedRun) -> TrainJob:
    """A finished run with LoRA in one process."""
    job = images.job("lora", settings={"method": "lora", "lora": {"rank": 4, "alpha": 8}})
    runs.run(job)
    return job


def script_losses(job: TrainJob) -> list[float]:
    """Losses of diffusers' train_text_to_image_sdxl.py (0.42.1), with the random draws of the job.

    Its scheduler adds the noise, its compute_snr gives min-SNR's weights; the mean is over each image and
    then over the batch, gradients are clipped at 1, AdamW is torch's.
    """
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from diffusers.training_utils import compute_snr

    settings, layout = job.settings, job.plan.layout
    unet = UNet2DConditionModel.from_pretrained(job.model_dir / "unet").train()
    trained = list(unet.parameters())
    scheduler = DDPMScheduler.from_pretrained(job.model_dir / "scheduler")
    rate = settings.optimizer
    optimizer = torch.optim.AdamW(
        trained, lr=float(rate.lr), betas=rate.betas, eps=rate.eps, weight_decay=rate.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(settings.schedule, job.total_steps))
    assert job.reference is not None
    task, data, losses = TextToImage(settings, job.reference), Prepared(job.data_dir), []
    for step in range(job.total_steps):
        batches = list(
            task.batches(data, dataclasses.replace(layout, nodes=1, processes_per_node=1), step, 0)
        )
        total = 0.0
        for batch in batches:
            noisy = scheduler.add_noise(batch.clean, batch.noise, batch.steps)
            output = unet(
                noisy,
                batch.steps,
                batch.text,
                added_cond_kwargs={"text_embeds": batch.summary, "time_ids": batch.time_ids},
            ).sample
            snr = compute_snr(scheduler, batch.steps)
            weights = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0] / snr
            errors = functional.mse_loss(output.float(), batch.noise.float(), reduction="none")
            loss = (errors.mean(dim=list(range(1, errors.ndim))) * weights).mean() / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def losses_of(job: TrainJob) -> list[float]:
    return runs.losses(runs.steps(job))


def test_losses_equal_those_of_the_diffusers_training_script(trained: TrainJob) -> None:
    assert losses_of(trained) == pytest.approx(script_losses(trained), abs=CLOSE)
    for step in runs.steps(trained):  # and the quarters of the noise schedule have losses of their own
        assert step.metrics
        assert set(step.metrics) <= set(QUARTERS)
        assert all(value > 0 for value in step.metrics.values())


@pytest.mark.nightly
@pytest.mark.parametrize(("method", "replicas"), [("full", 1), ("full", 2), ("lora", 1)])
def test_two_processes_have_the_losses_of_one(
    images: PreparedRun, method: str, replicas: int, request: pytest.FixtureRequest
) -> None:
    alone = request.getfixturevalue("trained" if method == "full" else "adapted")
    settings = {"method": method, "lora": {"rank": 4, "alpha": 8}} if method == "lora" else {}
    job = images.job(f"{method}-two-{replicas}", world=2, settings=settings)
    layout = dataclasses.replace(job.plan.layout, replicate=replicas)
    job = dataclasses.replace(job, plan=dataclasses.replace(job.plan, layout=layout))
    runs.run(job)
    assert losses_of(job) == pytest.approx(losses_of(alone), abs=CLOSE)


def test_a_run_resumes_from_its_checkpoint_exactly(images: PreparedRun, trained: TrainJob) -> None:
    first = images.job("first", checkpoint_every=3)
    runs.run(first)
    output = runs.resumed(first, images.folder / "again", 3)
    runs.run(output)
    assert losses_of(output) == losses_of(trained)[3:]
    assert_equal(weights_of(output), weights_of(trained))


def weights_of(job: TrainJob) -> dict[str, torch.Tensor]:
    return load_file(job.output_dir / "model" / "unet" / _pipeline_layout.WEIGHTS)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def picture(pipeline: Any) -> Any:
    """Return the image that a pipeline generates from a caption and a seed, as an array."""
    pipeline.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "np"}
    return pipeline("a small red circle", generator=torch.Generator().manual_seed(1), **options).images


def test_the_export_of_a_full_run_is_a_pipeline_with_the_trained_weights(
    trained: TrainJob, tmp_path: Path
) -> None:
    from diffusers import StableDiffusionXLPipeline

    engines.get("fsdp2").collect(trained, tmp_path)
    loaded = StableDiffusionXLPipeline.from_pretrained(tmp_path / "model")
    assert_equal(dict(loaded.unet.state_dict()), weights_of(trained))
    base = StableDiffusionXLPipeline.from_pretrained(trained.model_dir)
    assert abs(picture(loaded) - picture(base)).max() > 0.01
    base.unet.load_state_dict(weights_of(trained))
    assert abs(picture(loaded) - picture(base)).max() == 0


def test_merged_and_separate_lora_exports_generate_the_same_images(adapted: TrainJob, tmp_path: Path) -> None:
    from diffusers import StableDiffusionXLPipeline

    engines.get("fsdp2").collect(adapted, tmp_path)
    merged = StableDiffusionXLPipeline.from_pretrained(tmp_path / "model")
    alone = StableDiffusionXLPipeline.from_pretrained(adapted.model_dir)
    before = picture(alone)
    alone.load_lora_weights(tmp_path / "adapter", weight_name=_pipeline_layout.LORA)
    after = picture(alone)
    assert abs(after - before).max() > 0.01
    assert abs(after - picture(merged)).max() < 1e-4
    reloaded_pipeline = StableDiffusionXLPipeline.from_pretrained(adapted.model_dir)
    reloaded_pipeline.load_lora_weights(tmp_path / "adapter", weight_name=_pipeline_layout.LORA)
    assert abs(after - picture(reloaded_pipeline)).max() == 0


def test_a_kohya_lora_file_has_the_tensor_names_and_scale_that_image_programs_expect(
    adapted: TrainJob, tmp_path: Path
) -> None:
    from diffusers import StableDiffusionXLPipeline

    engines.get("fsdp2").collect(adapted, tmp_path)
    kohya = load_file(tmp_path / "adapter" / _pipeline_layout.KOHYA)
    layer = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q"
    assert kohya[f"{layer}.lora_down.weight"].shape[0] == 4
    assert kohya[f"{layer}.lora_up.weight"].shape[1] == 4
    assert kohya[f"{layer}.alpha"].item() == 8
    ours, theirs = (StableDiffusionXLPipeline.from_pretrained(adapted.model_dir) for _ in range(2))
    ours.load_lora_weights(tmp_path / "adapter", weight_name=_pipeline_layout.LORA)
    theirs.load_lora_weights(tmp_path / "adapter", weight_name=_pipeline_layout.KOHYA)
    assert abs(picture(ours) - picture(theirs)).max() < 1e-4


def test_the_configured_share_of_captions_is_dropped(images: PreparedRun) -> None:
    job = images.job("dropout", settings={"images": {"prompt_dropout": 0.5}})
    assert job.reference is not None
    task, data = TextToImage(job.settings, job.reference), Prepared(job.data_dir)
    drawn: list[LatentBatch] = []
    for step in range(job.total_steps):
        drawn += task.batches(data, job.plan.layout, step, 0)
    left_out = torch.cat([(batch.text == 0).all(dim=2).all(dim=1) for batch in drawn])
    assert 0.2 < left_out.float().mean() < 0.8
    for batch in drawn:
        silent = (batch.text == 0).all(dim=2).all(dim=1)
        assert (batch.summary[silent] == 0).all()
        assert (batch.summary[~silent] != 0).any(dim=1).all()


TEXTS: dict[str, Any] = {
    "method": "lora",
    "lora": {"rank": 4, "alpha": 8},
    "images": {"text_encoders": True},
    "evaluation": {"every_steps": 3, "generations": 1},
}


@pytest.fixture(scope="module")
def with_texts(images: PreparedRun) -> TrainJob:
    """A finished run with LoRA on the UNet and on both text encoders, in one process."""
    job = images.job("texts", settings=TEXTS, checkpoint_every=3)
    runs.run(job)
    return job


@pytest.mark.nightly
def test_text_encoders_are_trained_and_exported_with_the_unet(
    adapted: TrainJob, with_texts: TrainJob, tmp_path: Path
) -> None:
    from diffusers import StableDiffusionXLPipeline

    losses, unet_alone = losses_of(with_texts), losses_of(adapted)
    assert losses[0] == pytest.approx(unet_alone[0], abs=CLOSE), "LoRA begins as nothing"
    assert losses[-1] != pytest.approx(unet_alone[-1], abs=CLOSE)
    engines.get("fsdp2").collect(with_texts, tmp_path)
    merged = StableDiffusionXLPipeline.from_pretrained(tmp_path / "model")
    alone = StableDiffusionXLPipeline.from_pretrained(with_texts.model_dir)
    for name in ("text_encoder", "text_encoder_2"):
        before, exported_state = getattr(alone, name).state_dict(), getattr(merged, name).state_dict()
        assert any(not torch.equal(before[key], weight) for key, weight in exported_state.items())
    alone.load_lora_weights(tmp_path / "adapter", weight_name=_pipeline_layout.LORA)
    assert abs(picture(alone) - picture(merged)).max() < 1e-3
    kohya = StableDiffusionXLPipeline.from_pretrained(with_texts.model_dir)
    kohya.load_lora_weights(tmp_path / "adapter", weight_name=_pipeline_layout.KOHYA)
    assert abs(picture(alone) - picture(kohya)).max() < 1e-3
    names = load_file(tmp_path / "adapter" / _pipeline_layout.KOHYA)
    assert {name.partition("_text_model")[0] for name in names if "_te" in name} == {"lora_te1", "lora_te2"}
    held_out = PreparedImages(with_texts.held_out_dir)
    _, after, drawn = image_evaluation.measure(
        with_texts.model_dir, tmp_path / "model", held_out, rows=len(held_out), captions=1, device="cpu"
    )
    assert after is not None
    assert evaluations(with_texts)[-1].loss == pytest.approx(after.loss, abs=CLOSE)
    newest = events_of_rank_0(with_texts, EvaluationImages)[-1]
    assert abs(pixels(newest.pictures[0]).astype(int) - pixels(drawn[0].finetuned)).max() <= 2


@pytest.mark.nightly
def test_text_encoders_resume_exactly_and_train_equally_on_two_processes(
    images: PreparedRun, with_texts: TrainJob, tmp_path: Path
) -> None:
    resumed = runs.resumed(with_texts, tmp_path / "again", 3)
    runs.run(resumed)
    assert losses_of(resumed) == losses_of(with_texts)[3:]
    two = images.job("texts-two", settings=TEXTS, world=2)
    runs.run(two)
    assert losses_of(two) == pytest.approx(losses_of(with_texts), abs=CLOSE)
    assert evaluations(two)[-1].loss == pytest.approx(evaluations(with_texts)[-1].loss, abs=CLOSE)


EVALUATED: dict[str, Any] = {
    "images": {"ema_decay": 0.9},
    "evaluation": {"every_steps": 3, "generations": 2},
}


@pytest.fixture(scope="module")
def averaged(images: PreparedRun) -> TrainJob:
    """A finished full run in one process with a moving average of the weights, evaluated during training."""
    job = images.job("averaged", settings=EVALUATED, checkpoint_every=3)
    runs.run(job)
    return job


def events_of_rank_0(job: TrainJob, kind: type[Any]) -> list[Any]:
    """Return the events of one kind reported by rank 0, in order."""
    events = Follower(job.telemetry_dir).poll()
    return [event for event in events if isinstance(event, kind) and event.rank == 0]


def evaluations(job: TrainJob) -> list[Evaluated]:
    """Return finished evaluations; a long one also reports progress."""
    return [event for event in events_of_rank_0(job, Evaluated) if event.loss is not None]


@pytest.mark.nightly
def test_a_moving_average_changes_only_the_export_and_resumes_exactly(
    trained: TrainJob, averaged: TrainJob, tmp_path: Path
) -> None:
    assert losses_of(averaged) == losses_of(trained)
    plain, mean = weights_of(trained), weights_of(averaged)
    assert plain.keys() == mean.keys()
    assert not all(torch.equal(plain[name], mean[name]) for name in plain)
    resumed = runs.resumed(averaged, tmp_path / "again", 3)
    runs.run(resumed)
    assert losses_of(resumed) == losses_of(averaged)[3:]
    assert_equal(weights_of(resumed), weights_of(averaged))
    assert [event.step for event in events_of_rank_0(resumed, EvaluationImages)] == [6], (
        "the base was drawn by the first attempt"
    )


def test_a_checkpoint_without_the_moving_average_is_refused(
    images: PreparedRun, averaged: TrainJob, tmp_path: Path
) -> None:
    settings = averaged.settings.model_copy(
        update={"images": averaged.settings.images.model_copy(update={"ema_decay": None})}
    )
    resumed = dataclasses.replace(runs.resumed(averaged, tmp_path / "again", 3), settings=settings)
    assert "average 0.9, this run has none" in runs.start(resumed).stderr


@pytest.mark.nightly
def test_two_processes_have_the_evaluation_loss_and_sample_images_of_one(
    images: PreparedRun, averaged: TrainJob
) -> None:
    two = images.job("averaged-two", settings=EVALUATED, world=2)
    runs.run(two)
    for one, other in zip(evaluations(averaged), evaluations(two), strict=True):
        assert (one.step, one.done, one.rows) == (other.step, other.done, other.rows)
        assert one.loss == pytest.approx(other.loss, abs=CLOSE)
        assert one.metrics == pytest.approx(other.metrics, abs=CLOSE)
    for drawn, drawn_by_two in zip(
        events_of_rank_0(averaged, EvaluationImages), events_of_rank_0(two, EvaluationImages), strict=True
    ):
        assert (drawn.step, drawn.captions) == (drawn_by_two.step, drawn_by_two.captions)
        for picture_of_one, picture_of_two in zip(drawn.pictures, drawn_by_two.pictures, strict=True):
            difference = pixels(picture_of_one).astype(int) - pixels(picture_of_two).astype(int)
            assert abs(difference).max() <= 2, "of 255"


def pixels(png: str) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(base64.b64decode(png))))


def test_an_evaluation_during_training_equals_that_of_the_exported_pipeline(
    averaged: TrainJob, tmp_path: Path
) -> None:
    engines.get("fsdp2").collect(averaged, tmp_path)
    held_out = PreparedImages(averaged.held_out_dir)
    before, after, drawn = image_evaluation.measure(
        averaged.model_dir, tmp_path / "model", held_out, rows=len(held_out), captions=2, device="cpu"
    )
    assert before is not None
    assert after is not None
    last = evaluations(averaged)[-1]
    assert last.loss == pytest.approx(after.loss, abs=CLOSE)
    assert last.metrics == pytest.approx(after.metrics, abs=CLOSE)
    assert after.loss < before.loss
    base, *_, newest = events_of_rank_0(averaged, EvaluationImages)
    assert (base.step, newest.step) == (0, averaged.total_steps)
    for number, each in enumerate(drawn):
        assert base.captions[number] == each.prompt
        assert abs(pixels(base.pictures[number]).astype(int) - pixels(each.base)).max() <= 2
        assert abs(pixels(newest.pictures[number]).astype(int) - pixels(each.finetuned)).max() <= 2


@pytest.mark.nightly
def test_a_clip_model_scores_how_well_images_match_their_captions(averaged: TrainJob, tmp_path: Path) -> None:
    clip = make_clip(averaged.model_dir, tmp_path / "clip")
    engines.get("fsdp2").collect(averaged, tmp_path)
    held_out = PreparedImages(averaged.held_out_dir)
    options: dict[str, Any] = {"rows": 2, "captions": 2, "device": "cpu", "clip_model": str(clip)}
    before, after, _ = image_evaluation.measure(averaged.model_dir, tmp_path / "model", held_out, **options)
    assert before is not None
    assert after is not None
    clip_scores = before.metrics["CLIP score"], after.metrics["CLIP score"]
    assert all(0 <= value <= 100 for value in clip_scores)
    assert clip_scores[0] != clip_scores[1]
    mean = sum(value for name, value in after.metrics.items() if name in QUARTERS) / 4
    assert after.loss == pytest.approx(mean), "it is no part of the loss"


def make_clip(pipeline: Path, folder: Path) -> Path:
    """Create a CLIP model with random weights and the tokenizer of a pipeline."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    tokenizer = CLIPTokenizer.from_pretrained(pipeline / "tokenizer")
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    texts = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(7)
    config = CLIPConfig(
        text_config=size | texts, vision_config=size | {"image_size": 32, "patch_size": 8}, projection_dim=8
    )
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder
