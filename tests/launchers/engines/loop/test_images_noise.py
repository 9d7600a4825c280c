"""Noise on latents, compared with diffusers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

import numpy as np  # noqa: E402

from launchers.engines.loop.images import NoiseSchedule, noisy_quarters  # noqa: E402
from launchers.precompute.latents import Latent  # noqa: E402


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noisy_latents_and_targets_equal_those_of_diffusers(prediction: str) -> None:
    theirs = diffusers.DDPMScheduler(num_train_timesteps=50, prediction_type=prediction)
    ours = NoiseSchedule(dict(theirs.config))
    clean, noise = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(1)).unbind()
    steps = torch.tensor([0, 20, 49])
    assert torch.allclose(ours.add(clean, noise, steps), theirs.add_noise(clean, noise, steps))
    expected_target = noise if prediction == "epsilon" else theirs.get_velocity(clean, noise, steps)
    assert torch.allclose(ours.target(clean, noise, steps), expected_target)


def test_a_held_out_image_is_evaluated_at_four_timesteps_with_the_noise_of_its_row() -> None:
    shape = {"mean": (4, 2, 2), "std": (4, 2, 2), "text": (77, 8), "summary": (8,), "tokens": (2, 77)}
    latent = Latent(**{name: torch.ones(size) for name, size in shape.items()})
    schedule = NoiseSchedule({"num_train_timesteps": 1000})
    first, second_noise, other = (
        noisy_quarters(latent, np.zeros(6, dtype=np.int32), row, schedule, 0.5) for row in (3, 3, 4)
    )
    assert first.steps.tolist() == [125, 375, 625, 875]
    assert torch.equal(first.clean, torch.full((4, 4, 2, 2), 0.5))
    assert torch.equal(first.noise, first.noise[:1].expand(4, -1, -1, -1))
    assert torch.equal(first.noise, second_noise.noise)
    assert not torch.equal(first.noise, other.noise)
