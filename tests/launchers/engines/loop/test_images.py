"""A UNet in the loop: its losses beside those of diffusers' own training script, and its export."""

from __future__ import annotations

import dataclasses
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
from launchers.engines.loop.images import LatentBatch, NoiseSchedule, TextToImage
from launchers.gang.job import TrainJob
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


def script_losses(job: TrainJob, *, adapters: bool) -> list[float]:
    """The losses of diffusers' train_text_to_image_sdxl.py (0.42.1), with what the job draws.

    Its scheduler adds the noise, its compute_snr gives min-SNR's weights; the mean is over each image and
    then over the batch, gradients are clipped at 1, AdamW is torch's.
    """
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from diffusers.training_utils import compute_snr
    from peft import LoraConfig

    settings, layout = job.settings, job.plan.layout
    unet = UNet2DConditionModel.from_pretrained(job.model_dir / "unet").train()
    torch.manual_seed(settings.seed)
    if adapters:
        unet.requires_grad_(False)
        targets = ["to_k", "to_q", "to_v", "to_out.0"]
        lora = settings.lora
        unet.add_adapter(
            LoraConfig(
                r=lora.rank, lora_alpha=int(lora.alpha), init_lora_weights="gaussian", target_modules=targets
            )
        )
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
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
            found = unet(
                noisy,
                batch.steps,
                batch.text,
                added_cond_kwargs={"text_embeds": batch.summary, "time_ids": batch.time_ids},
            ).sample
            snr = compute_snr(scheduler, batch.steps)
            weights = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0] / snr
            errors = functional.mse_loss(found.float(), batch.noise.float(), reduction="none")
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


def test_losses_are_those_of_diffusers_script(trained: TrainJob) -> None:
    assert losses_of(trained) == pytest.approx(script_losses(trained, adapters=False), abs=CLOSE)


def test_losses_with_lora_are_those_of_diffusers_script(adapted: TrainJob) -> None:
    assert losses_of(adapted) == pytest.approx(script_losses(adapted, adapters=True), abs=CLOSE)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_two_processes_train_as_one(images: PreparedRun, method: str, request: pytest.FixtureRequest) -> None:
    alone = request.getfixturevalue("trained" if method == "full" else "adapted")
    settings = {"method": method, "lora": {"rank": 4, "alpha": 8}} if method == "lora" else {}
    job = images.job(f"{method}-two", world=2, settings=settings)
    runs.run(job)
    assert losses_of(job) == pytest.approx(losses_of(alone), abs=CLOSE)


def test_a_run_goes_on_from_its_checkpoint_as_if_nothing_had_been(
    images: PreparedRun, trained: TrainJob
) -> None:
    first = images.job("first", checkpoint_every=3)
    runs.run(first)
    again = runs.resumed(first, images.folder / "again", 3)
    runs.run(again)
    assert losses_of(again) == losses_of(trained)[3:]
    assert_equal(weights_of(again), weights_of(trained))


def weights_of(job: TrainJob) -> dict[str, torch.Tensor]:
    return load_file(job.output_dir / "model" / "unet" / _pipeline_layout.WEIGHTS)


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def picture(pipeline: Any) -> Any:
    """What a pipeline makes of a caption and a seed, as an array."""
    pipeline.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"num_inference_steps": 2, "height": 64, "width": 64, "output_type": "np"}
    return pipeline("a small red circle", generator=torch.Generator().manual_seed(1), **options).images


def test_a_full_run_s_export_is_a_pipeline_with_the_trained_weights(
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


def test_lora_s_export_merged_and_alone_makes_the_same_pictures(adapted: TrainJob, tmp_path: Path) -> None:
    from diffusers import StableDiffusionXLPipeline

    engines.get("fsdp2").collect(adapted, tmp_path)
    merged = StableDiffusionXLPipeline.from_pretrained(tmp_path / "model")
    alone = StableDiffusionXLPipeline.from_pretrained(adapted.model_dir)
    before = picture(alone)
    alone.load_lora_weights(tmp_path / "adapter", weight_name=_pipeline_layout.LORA)
    after = picture(alone)
    assert abs(after - before).max() > 0.01
    assert abs(after - picture(merged)).max() < 1e-4
    again = StableDiffusionXLPipeline.from_pretrained(adapted.model_dir)
    again.load_lora_weights(tmp_path / "adapter", weight_name=_pipeline_layout.LORA)
    assert abs(after - picture(again)).max() == 0


def test_lora_in_kohya_s_format_has_the_names_and_the_scale_that_image_programs_read(
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


def test_velocities_are_what_the_scheduler_says() -> None:
    from diffusers import DDPMScheduler

    config = {"beta_schedule": "scaled_linear", "prediction_type": "v_prediction"}
    theirs, ours = DDPMScheduler.from_config(config), NoiseSchedule(config)
    clean, noise = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    steps = torch.tensor([10, 900])
    torch.testing.assert_close(ours.target(clean, noise, steps), theirs.get_velocity(clean, noise, steps))
    torch.testing.assert_close(ours.add(clean, noise, steps), theirs.add_noise(clean, noise, steps))


def test_captions_are_left_out_of_the_asked_share_with_zeros(images: PreparedRun) -> None:
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
