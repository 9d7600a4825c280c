"""Noise on latents, against diffusers' own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from launchers.engines.loop.images import NoiseSchedule  # noqa: E402


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_noisy_latents_and_targets_are_those_of_diffusers(prediction: str) -> None:
    theirs = diffusers.DDPMScheduler(num_train_timesteps=50, prediction_type=prediction)
    ours = NoiseSchedule(dict(theirs.config))
    clean, noise = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(1)).unbind()
    steps = torch.tensor([0, 20, 49])
    assert torch.allclose(ours.add(clean, noise, steps), theirs.add_noise(clean, noise, steps))
    wanted = noise if prediction == "epsilon" else theirs.get_velocity(clean, noise, steps)
    assert torch.allclose(ours.target(clean, noise, steps), wanted)
