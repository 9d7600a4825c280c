"""Small jobs that train a UNet on drawn shapes, on CPUs, one process per rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.dataset import drawn_shapes
from launchers.gang.job import TrainJob
from launchers.images import pictures
from launchers.images import runs as image_runs
from launchers.models import tiny_sdxl
from launchers.precompute import latents
from launchers.settings import Settings, overlay
from launchers.store.bundles import LocalStorage
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs

TASK: dict[str, Any] = {
    "task": "text-to-image",
    "model": tiny_sdxl.NAME,
    "dataset": drawn_shapes.BUILT_IN,
    "images": {"resolution": 64},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A pipeline and prepared images; precomputed latents are stored next to them."""

    folder: Path
    model: Path
    data: Path
    batch: int
    steps: int

    def job(self, name: str, **options: Any) -> TrainJob:
        """Return a job of the FSDP2 engine with its latents; ``name``: of its work folder."""
        settings = overlay(TASK | {"seed": 3}, options.pop("settings", {}))
        world, micro = options.pop("world", 1), options.pop("micro", 2)
        job = runs.make_job(
            self.folder / name,
            self.model,
            self.data,
            steps=options.pop("steps", self.steps),
            world=world,
            micro=micro,
            accumulation=self.batch // (world * micro),
            engine="fsdp2",
            sharding="fsdp" if world > 1 else "none",
            settings=settings,
            **options,
        )
        job = dataclasses.replace(job, reference=fetch_latents(job, self.folder))
        if not job.evaluates:
            return job
        held_out = dataclasses.replace(job, data_dir=job.held_out_dir)
        return dataclasses.replace(job, held_out_reference=fetch_latents(held_out, self.folder))


def fetch_latents(job: TrainJob, folder: Path, address: NodeAddress | None = None) -> Path:
    """Return the latents of the images of a job, with a store in ``folder``."""
    alone = NodeAddress(node=0, nodes=1, main_host="127.0.0.1", ports=(), secret=Secret(""), run="test")
    store = LocalStorage(folder / "store")
    with ranks.forked_processes():
        return latents.precompute(job, address or alone, store, folder / "latents")


def prepared(folder: Path, *, images: int = 40, batch: int = 4, steps: int = 6) -> Prepared:
    """Prepare tiny-sdxl and a number of drawn shapes in steps of ``batch``."""
    read = list(pictures.read(drawn_shapes.write(folder / "shapes", images), min_side=32))
    values = TASK | {"global_batch_size": batch, "max_steps": steps, "epochs": 10}
    settings = Settings.model_validate(values)
    image_runs.prepare(read, None, settings, folder / "data")
    model = tiny_sdxl.make(folder / "model")
    return Prepared(folder=folder, model=model, data=folder / "data", batch=batch, steps=steps)
