"""Compare losses of a UNet with those of diffusers' own training script, step by step.

    git clone --depth 1 https://github.com/huggingface/diffusers
    python -m benchmarks.diffusers_script diffusers/examples/text_to_image/train_text_to_image_sdxl.py

Writes benchmarks/results/diffusers_script.{json,md}. The script's main() runs on tiny-sdxl with our latents,
text embeddings, noise and time steps; target, weights, gradients, clipping, optimizer and schedule are its
own. torchvision, which it imports to read images, is replaced by a stub.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.machinery
import importlib.util
import json
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import torch

from benchmarks.machine import describe
from launchers.dataset import drawn_shapes
from launchers.dataset.prepared import Prepared
from launchers.engines.loop.images import LatentBatch, TextToImage
from launchers.gang.job import TrainJob
from launchers.images import pictures
from launchers.images import runs as image_runs
from launchers.models import tiny_sdxl
from launchers.settings import Settings
from tests.launchers.engines.loop import runs
from tests.launchers.images.runs import TASK
from tests.launchers.images.runs import Prepared as PreparedRun

RESULTS = Path(__file__).parent / "results"
BATCH, STEPS, SIDE = 4, 12, 64
CLOSE = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "min-SNR 5": {"min_snr_gamma": 5.0},
    "not weighed": {"min_snr_gamma": None},
    "min-SNR 5, noise offset 0.1": {"min_snr_gamma": 5.0, "noise_offset": 0.1},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("script", type=Path, help="train_text_to_image_sdxl.py of diffusers' examples")
    script: Path = parser.parse_args().script
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        images = prepared(Path(temporary))
        for name, values in CASES.items():
            settings = {
                "images": values,
                "optimizer": {"lr": 1e-3, "weight_decay": 1e-2},
                "schedule": {"name": "constant", "warmup_steps": 0},
            }
            job = images.job(name.replace(" ", "-"), micro=BATCH, settings=settings)
            runs.run(job)
            ours = runs.losses(runs.steps(job))
            theirs = script_losses(script, job, Path(temporary) / "script")
            difference = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            rows.append({"case": name, "ours": ours, "script": theirs, "largest_difference": difference})
            print(f"{name}: {STEPS} steps, largest difference {difference:.1e}", flush=True)
    write(rows)
    sys.exit(0 if all(row["largest_difference"] <= CLOSE for row in rows) else 1)


def prepared(folder: Path) -> PreparedRun:
    """Prepare tiny-sdxl and the square images of the drawn shapes; the script supports squares only."""
    read = pictures.read(drawn_shapes.write(folder / "shapes", 400), min_side=SIDE // 2)
    squares = [each for each in read if each.width == each.height]
    values = TASK | {"global_batch_size": BATCH, "max_steps": STEPS, "seq_len": SIDE, "epochs": 10}
    image_runs.prepare(squares, None, Settings.model_validate(values), folder / "data")
    model = tiny_sdxl.make(folder / "model")
    return PreparedRun(folder=folder, model=model, data=folder / "data", batch=BATCH, steps=STEPS)


class Rows:
    """Substitute for the script's dataset: yields its computed values in the order of our run."""

    column_names = ("image", "text")

    def __init__(self, batches: list[LatentBatch]) -> None:
        self._images = [image for batch in batches for image in batch.split()]

    def with_transform(self, *_: Any) -> Rows:
        return self

    def map(self, *_: Any, **__: Any) -> Rows:
        return self

    def remove_columns(self, _: Any) -> Rows:
        return self

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, place: int) -> dict[str, Any]:
        image = self._images[place]
        height, width, top, crop_left, *_ = image.time_ids[0].int().tolist()
        return {
            "model_input": image.clean[0],
            "prompt_embeds": image.text[0],
            "pooled_prompt_embeds": image.summary[0],
            "original_sizes": (height, width),
            "crop_top_lefts": (top, crop_left),
        }


def script_losses(path: Path, job: TrainJob, output: Path) -> list[float]:
    """Return the losses that the script logs."""
    assert job.reference is not None
    task, data = TextToImage(job.settings, job.reference), Prepared(job.data_dir)
    batches = [
        batch for step in range(job.total_steps) for batch in task.batches(data, job.plan.layout, step, 0)
    ]
    noises, steps = (batch.noise for batch in batches), (batch.steps for batch in batches)
    losses: list[float] = []
    module = imported(path)
    rate, gamma = job.settings.optimizer, job.settings.images.min_snr_gamma
    arguments = [
        f"--pretrained_model_name_or_path={job.model_dir}",
        "--dataset_name=ours",
        "--image_column=image",
        "--caption_column=text",
        f"--output_dir={output}",
        f"--resolution={SIDE}",
        f"--train_batch_size={BATCH}",
        f"--max_train_steps={job.total_steps}",
        f"--learning_rate={rate.lr}",
        f"--adam_weight_decay={rate.weight_decay}",
        f"--adam_beta1={rate.betas[0]}",
        f"--adam_beta2={rate.betas[1]}",
        f"--adam_epsilon={rate.eps}",
        f"--max_grad_norm={job.settings.clip_grad_norm}",
        "--lr_scheduler=constant",
        "--lr_warmup_steps=0",
        *([] if gamma is None else [f"--snr_gamma={gamma}"]),
    ]

    def ours_if(shape: Any, drawn: Iterator[torch.Tensor], otherwise: Any) -> Any:
        return next(drawn) if tuple(shape) == (BATCH, 4, SIDE // 8, SIDE // 8) else otherwise()

    plain_noise, begin = torch.randn_like, torch.utils.data.DataLoader.__init__

    def in_order(loader: Any, *rows: Any, **options: Any) -> None:
        begin(loader, *rows, **options | {"shuffle": False})

    with (
        mock.patch.object(module, "load_dataset", return_value={"train": Rows(batches)}),
        mock.patch.object(module, "concatenate_datasets", lambda parts, **_: parts[0], create=True),
        mock.patch.object(module.AutoTokenizer, "from_pretrained", return_value=None),
        mock.patch.object(module.Accelerator, "init_trackers"),
        mock.patch.object(
            module.Accelerator, "log", lambda _, values, **__: losses.append(values["train_loss"])
        ),
        mock.patch.object(torch.utils.data.DataLoader, "__init__", in_order),
        mock.patch.object(
            torch,
            "randn_like",
            lambda like, **options: ours_if(like.shape, noises, lambda: plain_noise(like, **options)),
        ),
        mock.patch.object(torch, "randint", side_effect=steps),
        mock.patch.object(
            torch, "randn", lambda *shape, **__: torch.zeros(*shape)
        ),  # the noise offset is part of our noise
        mock.patch.object(sys, "argv", [str(path), *arguments]),
    ):
        module.main(module.parse_args())
    return losses


def imported(path: Path) -> Any:
    """Import the script as a module, whichever version of diffusers it requires."""
    vision, transforms, functional = (
        types.ModuleType(name)
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    )
    for name in (
        "Resize",
        "CenterCrop",
        "RandomCrop",
        "RandomHorizontalFlip",
        "ToTensor",
        "Normalize",
        "Compose",
    ):
        setattr(transforms, name, lambda *_, **__: None)
    transforms.InterpolationMode = types.SimpleNamespace(BILINEAR="bilinear", LANCZOS="lanczos")  # type: ignore[attr-defined]
    functional.crop = None  # type: ignore[attr-defined]
    vision.transforms = transforms  # type: ignore[attr-defined]
    substitutes = {module.__name__: module for module in (vision, transforms, functional)}
    for name, module in substitutes.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for name in ("accelerate", "datasets", "diffusers.training_utils"):  # these look for the real torchvision
        importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("diffusers_script", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, substitutes), mock.patch("diffusers.utils.check_min_version"):
        spec.loader.exec_module(module)
    return module


def write(rows: list[dict[str, Any]]) -> None:
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": describe(),
        "diffusers": diffusers.__version__,
        "torch": torch.__version__,
        "rows": rows,
    }
    (RESULTS / "diffusers_script.json").write_text(json.dumps(facts, indent=1) + "\n")
    lines = [
        "# Losses compared with diffusers' own script",
        "",
        "`python -m benchmarks.diffusers_script SCRIPT`: tiny-sdxl, all of the UNet, the same latents,",
        f"texts, noise and time steps; {STEPS} steps of {BATCH} images.",
        f"diffusers {diffusers.__version__}, {facts['date']}, {facts['machine']['text']}.",
        "",
        "| Loss | first step, ours | the script's | last step, ours | the script's | largest difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        (first, *_, last), (its_first, *_, its_last) = row["ours"], row["script"]
        figures = f"{first:.6f} | {its_first:.6f} | {last:.6f} | {its_last:.6f}"
        lines.append(f"| {row['case']} | {figures} | {row['largest_difference']:.1e} |")
    (RESULTS / "diffusers_script.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
