"""The section of settings of models that make images (task text-to-image)."""

from __future__ import annotations

from pydantic import Field, field_validator

from launchers.sections import Positive, PositiveFloat, Section

LEAST_RESOLUTION = 64


class Images(Section):
    resolution: Positive | None = Field(default=None, json_schema_extra={"multipleOf": 8})
    """Pixels of a square image's side; images of other shapes have about its area. A multiple of 8. Empty: as
    the model was published for."""
    prompt_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Share of the images that are learnt without their captions, so that prompts can be weighed against none
    when images are made (Ho and Salimans 2022, arXiv:2207.12598, section 3.1)."""
    min_snr_gamma: PositiveFloat | None = 5.0
    """Steps with little noise weigh less: by this over their signal-to-noise ratio (Hang et al. 2023,
    arXiv:2303.09556, equation 4, with their value). Empty: all weigh the same."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keep a moving average of what is trained, in fp32, and hand that over: of each step it keeps so much
    (0.9999 for long runs). Empty: the last weights themselves."""
    clip_model: str | None = None
    """A CLIP model, folder or Hugging Face id: how well do the evaluation's pictures fit their captions."""
    text_encoders: bool = False
    """With LoRA: adapters on both text encoders' attentions, too. Captions are then encoded in each step."""
    noise_offset: float = Field(default=0.0, ge=0)
    """Noise that is the same all over an image, for darker and lighter ones (0.05 to 0.1 is usual)."""

    @property
    def side(self) -> int:
        """``resolution``, once the model's default is filled in. Raises ValueError before."""
        if self.resolution is None:
            raise ValueError("images.resolution is not decided yet")
        return self.resolution

    @field_validator("resolution")
    @classmethod
    def _check_resolution(cls, value: int | None) -> int | None:
        if value is not None and (value % 8 or value < LEAST_RESOLUTION):
            raise ValueError(f"a multiple of 8 pixels, {LEAST_RESOLUTION} or more")
        return value
