"""A model that was looked up: what the user called it, where its files are, and its shape."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from estimator.models.clip import TextEncoderShape
from estimator.models.diffusion import DiffusionSpec
from estimator.models.spec import ModelSpec
from estimator.models.unet import UNetShape
from estimator.models.vision import VisionShape

Kind = Literal["made", "table", "hub", "folder", "s3", "stored"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """Resolution of a model's name by the table and the local disk."""

    kind: Kind
    """``made`` here, of the ``table`` of models, on the ``hub``, in a ``folder`` of this machine, on ``s3``;
    or ``stored``: put into a run's store by whoever launched it."""
    name: str
    """As the user gave it."""
    location: str
    """A Hugging Face id, a folder, an s3:// URL, or a key of the store; empty of a model that is made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRef(ModelSource):
    """Model of a run: resolved once at launch and passed to its steps."""

    spec: ModelSpec

    @property
    def hub_id(self) -> str | None:
        """Its Hugging Face id; None if its files are from elsewhere."""
        return self.location if self.kind in ("table", "hub") else None

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON values for :meth:`from_dict`, without the shape's default values."""
        values = {name: getattr(self, name) for name in ("kind", "name", "location")}
        defaults = {field.name: field.default for field in dataclasses.fields(self.spec)}
        shape = dataclasses.asdict(self.spec)
        return {**values, "spec": {key: value for key, value in shape.items() if value != defaults[key]}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelRef:
        shape = dict(values["spec"])
        if "vision" in shape:
            shape["vision"] = VisionShape(**shape["vision"])
        if "unet" not in shape:
            return cls(**{**values, "spec": ModelSpec(**shape)})
        unet: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in shape["unet"].items()
        }
        shape |= {
            "unet": UNetShape(**unet),
            "texts": tuple(TextEncoderShape(**value) for value in shape["texts"]),
        }
        return cls(**{**values, "spec": DiffusionSpec(**shape)})
