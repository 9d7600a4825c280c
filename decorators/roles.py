"""Roles of a flow's steps: the part of a plan that each requests."""

from __future__ import annotations

from typing import Literal

Role = Literal["train", "encode", "evaluate", "generate", "score", "compare", "data", "none"]
