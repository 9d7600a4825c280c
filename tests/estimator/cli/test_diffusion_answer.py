"""finetune estimate for a diffusion model."""

from __future__ import annotations

from tests.estimator.cli.estimates import answer, run


def test_a_diffusion_model_shows_what_is_known_and_what_is_not() -> None:
    found = answer("--model", "stable-diffusion-xl", "--gpu", "L4")
    assert found["memory"]["categories"]["weights"] == 2 * found["model"]["parameters"]
    assert found["memory"]["fits"] is False
    lora = answer("--model", "sdxl", "--method", "lora", "--gpu", "L4")
    assert lora["memory"]["categories"]["activations"] is None
    assert lora["memory"]["fits"] is None
    assert any("lora" in clause for clause in lora["unknown"])
    assert "unknown" in run("--model", "sdxl", "--method", "lora").output
    twice = answer("--model", "sdxl", "--image-size", "512")["memory"]["categories"]["activations"]
    assert twice < found["memory"]["categories"]["activations"]
