"""Settings section of image models (task text-to-image)."""

from __future__ import annotations

from pydantic import Field, field_validator

from launchers.settings.sections import Positive, PositiveFloat, Section

MIN_RESOLUTION = 64


class Images(Section):
    """Images with captions (task text-to-image)."""

    resolution: Positive | None = Field(default=None, json_schema_extra={"multipleOf": 8})
    """Side of a square image in pixels, a multiple of 8; other shapes have about the same area. Empty: the
    resolution that the model was published for."""
    prompt_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of the images trained without their captions, which classifier-free guidance needs (Ho and
    Salimans 2022, arXiv:2207.12598, section 3.1)."""
    min_snr_gamma: PositiveFloat | None = 5.0
    """Min-SNR weighting: steps with little noise are weighted by this value over their signal-to-noise
    ratio (Hang et al. 2023, arXiv:2303.09556, equation 4, with their value). Empty: equal weights."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Export an exponential moving average of the trained weights, kept in fp32, with this decay per step
    (0.9999 for long runs). Empty: export the last weights."""
    clip_model: str | None = None
    """CLIP model, as a folder or Hugging Face id, that scores how well the evaluation's images match their
    captions."""
    text_encoders: bool = False
    """Train LoRA adapters on the attention of both text encoders too. Captions are then encoded in each
    step."""
    noise_offset: float = Field(default=0.0, ge=0)
    """Noise offset: noise that is constant over an image, for darker and brighter results (0.05 to 0.1 is
    usual)."""

    @property
    def side(self) -> int:
        """``resolution`` after the model's default is filled in; raises ValueError before."""
        if self.resolution is None:
            raise ValueError("images.resolution is not resolved yet")
        return self.resolution

    @field_validator("resolution")
    @classmethod
    def _check_resolution(cls, value: int | None) -> int | None:
        if value is not None and (value % 8 or value < MIN_RESOLUTION):
            raise ValueError(f"a multiple of 8 pixels, {MIN_RESOLUTION} or more")
        return value
