"""The training engines, each in its own folder behind one small interface.

To add one: write a folder ``launchers/engines/NAME`` whose ``engine.py`` has ``ENGINE``, an :class:`Engine`,
and ``NEEDS``; and add its record to ``ENGINES`` of estimator/vocabulary.py, by which it is planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from estimator.models import PROJECTIONS

if TYPE_CHECKING:
    from launchers.gang.job import TrainJob
    from launchers.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Packages and modules that an engine's processes import, and the extra that installs them."""

    packages: tuple[str, ...]  # in addition to the base install
    modules: tuple[str, ...]  # modules of this package that a rank imports first
    distribution: str  # distribution package whose version is the engine's
    extra: str  # extra of metaflow-finetune that installs only this engine


class Engine(Protocol):
    """Interface of a training engine. Only :meth:`train` may import the engine's own packages."""

    def unsupported_settings(self, settings: Settings) -> str | None:
        """Return the reason why this engine rejects these settings for any model, as one clause, or None.

        What depends on the model is in estimator/engines/support.py.
        """

    def train(self, job: TrainJob) -> None:
        """Run in every process of the gang, under torchrun's environment (RANK, WORLD_SIZE...).

        Follows ``job.plan.layout`` and ``job.settings``, writes telemetry for its rank, a checkpoint
        every ``job.checkpoint_every`` steps, resumes from ``job.resume_dir``, and leaves its final
        output in ``job.output_dir`` of node 0.
        """

    def collect(self, job: TrainJob, destination: Path) -> None:
        """Lay out the output after training, on node 0, without torch.

        Writes ``destination/model`` (a complete model in Hugging Face format, adapters merged) and, for
        adapters, ``destination/adapter`` (PEFT format). For an adapter that cannot be merged there is no
        ``destination/model``, and the tokenizer is next to the adapter (:func:`result_of`).
        """


def result_of(folder: Path) -> Path:
    """Return the usable result of ``collect``: the complete model, or the adapter that cannot be merged."""
    model = folder / "model"
    return model if model.is_dir() else folder / "adapter"


def get(name: str) -> Engine:
    engine: Engine = import_module(f"launchers.engines.{name}.engine").ENGINE
    return engine


def needs(name: str) -> Needs:
    """Return the packages and modules that the processes of an engine import."""
    needs: Needs = import_module(f"launchers.engines.{name}.engine").NEEDS
    return needs


def generic_targets(settings: Settings) -> tuple[str, ...]:
    """Return the layers that get adapters, by Llama's names; ``all-linear`` means all seven of them."""
    targets = settings.lora.targets
    return PROJECTIONS if targets == "all-linear" else targets
