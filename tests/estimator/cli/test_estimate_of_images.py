"""finetune estimate for a model that makes images."""

from __future__ import annotations

import pytest

from tests.estimator.cli.estimates import answer, run


def test_the_unet_alone_is_trained_and_its_speed_is_unknown() -> None:
    response = answer(
        "--model", "stable-diffusion-xl", "--gpu", "L4", "--precision", "bf16", "--method", "full"
    )
    assert response["memory"]["categories"]["weights"] == 2 * response["model"]["parameters"]
    assert response["memory"]["verdict"] == "does not fit"
    assert response["setup"]["engine"] == "fsdp2"
    assert response["speed"]["tokens_per_second"] is None
    assert "no run of stable-diffusion-xl was published" in response["speed"]["basis"]


def test_smaller_images_need_less_activation_memory() -> None:
    small, large = (answer("--model", "sdxl", "--resolution", side) for side in ("512", "1024"))
    assert (small["model"]["resolution"], large["model"]["resolution"]) == (512, 1024)
    kept = [found["memory"]["categories"]["activations"] for found in (small, large)]
    assert kept[0] < kept[1] / 3


def test_moving_average_and_encoders_are_separate_memory_categories() -> None:
    response = answer("--model", "sdxl", "--ema", "--encoders")
    categories = response["memory"]["categories"]
    assert categories["average of the weights"] == 4 * response["model"]["parameters"]
    assert categories["VAE and text encoders"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "sdxl", "--seq-len", "512"), "generates images, which have no tokens"),
        (("--model", "llama-8b", "--resolution", "512"), "does not generate images"),
        (("--model", "llama-8b", "--ema"), "--ema: llama-8b does not generate images"),
        (("--model", "sdxl", "--resolution", "1020"), "multiple of 8"),
        (("--model", "sdxl", "--exact"), "supports language models"),
    ],
)
def test_options_of_another_kind_of_model_are_refused(options: tuple[str, ...], said: str) -> None:
    found = run(*options)
    assert found.exit_code != 0
    assert said in " ".join(found.output.split())
