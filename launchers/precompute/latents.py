"""Image latents and caption embeddings, precomputed before a UNet is trained on them.

The computation is divided among the nodes (launchers/precompute/parts.py) and runs in separate processes, so
training needs neither VAE nor text encoders. A part is a safetensors file with, for each row R,

    R.mean, R.std    [4, height / 8, width / 8], fp32: distribution of the latent, sampled in each step
    R.text           [77, width]: penultimate hidden layer of both encoders, concatenated
    R.summary        [width]: pooled caption embedding of the second encoder
    R.tokens         int64 [2, 77]: tokens of the caption for both encoders

The folder also contains ``noise.json``: configuration of the noise scheduler, and scale of the latents.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError
from estimator.memory.latents import MOST_AT_ONCE, images_at_once
from estimator.models import DiffusionSpec
from estimator.untrusted import read_json_object
from launchers.base.imports import collector_paused
from launchers.cluster.endpoint import NodeAddress
from launchers.cluster.processes import PARENT, die_with_parent
from launchers.dataset.prepared import Prepared
from launchers.gang.job import TrainJob
from launchers.images.prepared import PreparedImages
from launchers.images.texts import encode
from launchers.precompute import parts
from launchers.store.bundles import Storage

if TYPE_CHECKING:
    import torch

PART = 64  # rows per part
NOISE = "noise.json"
ENCODERS = ("vae", "text_encoder", "text_encoder_2")


def precompute(
    job: TrainJob, address: NodeAddress, store: Storage, work: Path, *, max_rows: int | None = None
) -> Path:
    """Compute the latents of the job's first ``max_rows`` rows (None: all), together with the other nodes.

    Returns their folder, below ``work``. Raises UserError as
    :func:`launchers.precompute.parts.compute_all` does.
    """
    data = Prepared(job.data_dir)
    division = parts.Parts(
        name="latents",
        module="launchers.precompute.latents",
        fingerprint=_fingerprint(job, data),
        count=min(len(data), max_rows or len(data)),
        size=PART,
        suffix=".safetensors",
    )
    work = work / division.fingerprint
    device = job.plan.layout.device
    request = {
        "model_dir": str(job.model_dir),
        "data_dir": str(job.data_dir),
        "device": device,
        "at_once": _images_per_batch(job),
    }
    limit_s = job.settings.resources.hang_timeout_s
    on_cpu, gpus = device == "cpu", job.plan.layout.processes_per_node
    parts.compute_all(
        division,
        request,
        address,
        store,
        work,
        on_cpu=on_cpu,
        limit_s=limit_s,
        processes=1 if on_cpu else gpus,
    )
    (work / NOISE).write_text(json.dumps(_noise_config(job.model_dir)))
    return work


def _fingerprint(job: TrainJob, data: Prepared) -> str:
    """Hash all inputs of the computation: images and captions, encoders, and type of device."""
    texts = [data.info.content, job.plan.layout.device, *(field.name for field in dataclasses.fields(Latent))]
    files = [path for name in ENCODERS for path in sorted((job.model_dir / name).glob("*.safetensors"))]
    return parts.fingerprint(texts, files)


def _images_per_batch(job: TrainJob) -> int:
    """Return the VAE's batch size, limited by the memory of the plan's GPU."""
    spec, memory = job.model.spec, job.plan.prediction.memory
    if job.plan.layout.device == "cpu" or memory is None or not isinstance(spec, DiffusionSpec):
        return MOST_AT_ONCE
    spec = dataclasses.replace(spec, resolution=job.settings.images.side)
    return images_at_once(spec, memory.capacity_bytes)


def _noise_config(model_dir: Path) -> dict[str, Any]:
    """Read the content of noise.json from a pipeline's folder."""
    scheduler = read_json_object(model_dir / "scheduler" / "scheduler_config.json")
    path = model_dir / "vae" / "config.json"
    factor = read_json_object(path).get("scaling_factor")
    if not isinstance(factor, int | float):
        raise UserError(f"{path}: scaling_factor is {factor!r}, not a number.", "Fetch it again.")
    return {"scheduler": scheduler, "scaling_factor": factor}


@dataclass(frozen=True, kw_only=True, slots=True)
class Latent:
    """Precomputed tensors of one row; for shapes see the module's docstring."""

    mean: torch.Tensor
    std: torch.Tensor
    text: torch.Tensor
    summary: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, read: Callable[[str], torch.Tensor], row: int) -> Latent:
        """Read one row's tensors. ``read``: returns a tensor by its name in a part's file."""
        return cls(**{field.name: read(f"{row}.{field.name}") for field in dataclasses.fields(cls)})


class Latents:
    """Reader of a folder of latents, with memory-mapped files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, Any] = {}
        self.noise: dict[str, Any] = json.loads((folder / NOISE).read_text())

    def row(self, index: int) -> Latent:
        """Return one row's tensors."""
        from safetensors import safe_open

        part = index // PART
        if part not in self._files:
            path = self._folder / f"part-{part:05d}.safetensors"
            self._files[part] = safe_open(path, framework="pt")
        return Latent.of(self._files[part].get_tensor, index)


def main() -> None:
    """Entry point of a process that computes parts."""
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    values = json.loads(Path(sys.argv[1]).read_text())
    encoders = Encoders(Path(values["model_dir"]), values["device"], values["at_once"])
    data, out = PreparedImages(Path(values["data_dir"])), Path(values["out"])
    for part in values["parts"]:
        first = part * PART
        rows = range(first, min(first + PART, values["count"]))
        _write(encoders.encode(data, rows), out / f"part-{part:05d}.safetensors")


class Encoders:
    """VAE and text encoders of a pipeline. The VAE is in fp32, because it overflows in half precision.

    ``at_once``: maximum batch size of the VAE.
    """

    def __init__(self, model_dir: Path, device: str, at_once: int = 1) -> None:
        with collector_paused():
            import torch

        self._folder, self._device, self._images_per_batch = model_dir, torch.device(device), at_once
        self._dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def encode(self, data: PreparedImages, rows: range) -> dict[str, torch.Tensor]:
        """Encode images and captions of the rows; return all tensors by name."""
        import torch

        tensors: dict[str, torch.Tensor] = {}
        with torch.inference_mode():
            for batch in _batches_by_size(data, rows, self._images_per_batch):
                tensors |= _by_row(batch, self._latents(data, batch) | self._texts(data, batch))
        return tensors

    def replace_text_encoders(self, *text_encoders: Any) -> None:
        """Use other text encoders, which must be on the device already."""
        self._text_encoders = text_encoders

    def encode_texts(self, data: PreparedImages, rows: range) -> dict[str, torch.Tensor]:
        """Encode only the captions of the rows; return the tensors by name."""
        import torch

        with torch.inference_mode():
            return _by_row(rows, self._texts(data, list(rows)))

    def _latents(self, data: PreparedImages, rows: list[int]) -> dict[str, torch.Tensor]:
        import torch

        pixels = torch.stack([torch.from_numpy(data.pixels(row)) for row in rows]).to(self._device)
        distribution = self._vae.encode(pixels).latent_dist
        return {"mean": distribution.mean.float(), "std": distribution.std.float()}

    def _texts(self, data: PreparedImages, rows: list[int]) -> dict[str, torch.Tensor]:
        import torch

        captions, tokenizers = [data.caption(row) for row in rows], self._tokenizers
        tokens = torch.stack([_tokens(tokenizer, captions) for tokenizer in tokenizers], dim=1)
        text, summary = encode(tokens.to(self._device).unbind(1), self._text_encoders)
        return {"text": text, "summary": summary, "tokens": tokens}

    @cached_property
    def _vae(self) -> Any:
        with collector_paused():
            from diffusers import AutoencoderKL

        return AutoencoderKL.from_pretrained(self._folder / "vae").to(self._device).eval()

    @cached_property
    def _tokenizers(self) -> list[Any]:
        with collector_paused():
            from transformers import CLIPTokenizer

        return [CLIPTokenizer.from_pretrained(self._folder / name) for name in ("tokenizer", "tokenizer_2")]

    @cached_property
    def _text_encoders(self) -> tuple[Any, ...]:
        with collector_paused():
            from transformers import CLIPTextModel, CLIPTextModelWithProjection

        kinds = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
        return tuple(
            kind.from_pretrained(self._folder / name, dtype=self._dtype).to(self._device).eval()
            for name, kind in kinds.items()
        )


def _by_row(rows: Iterable[int], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split batched tensors by row, move them to the CPU, and name them as in a part's file."""
    return {
        f"{row}.{name}": tensor.cpu().contiguous()
        for name, batch in tensors.items()
        for row, tensor in zip(rows, batch, strict=True)
    }


def _tokens(tokenizer: Any, captions: list[str]) -> torch.Tensor:
    """Tokenize captions for one encoder: int64 [captions, 77]."""
    length = tokenizer.model_max_length
    ids: torch.Tensor = tokenizer(
        captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    return ids


def _batches_by_size(data: PreparedImages, rows: range, max_rows: int) -> list[list[int]]:
    """Group the rows into batches of equally sized images, at most ``max_rows`` per batch."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        by_size.setdefault(data.target(row), []).append(row)
    return [
        same_size[i : i + max_rows]
        for same_size in by_size.values()
        for i in range(0, len(same_size), max_rows)
    ]


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write the file of a part atomically."""
    from safetensors.torch import save_file

    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.rename(path)


if __name__ == "__main__":
    main()
