"""Resolved model: name as entered by the user, location of the files, shape."""

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
    """Location of the files: ``made`` (built locally, no files), ``table``, ``hub``, ``folder``, ``s3``, or
    ``stored`` (uploaded to the store of the run at launch)."""
    name: str
    """Name as entered by the user."""
    location: str
    """A Hugging Face id, a folder, an s3:// URL, or a key of the store; empty for ``made``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRef(ModelSource):
    """Model of a run: resolved once at launch and passed to its steps."""

    spec: ModelSpec

    @property
    def hub_id(self) -> str | None:
        """Hugging Face id of the model; None if its files are not on the Hub."""
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
