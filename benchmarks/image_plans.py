"""Build the table of docs/images.md: memory for training Stable Diffusion XL, and cards that fit."""

from __future__ import annotations

from estimator import hardware, memory
from estimator.models.diffusion import STABLE_DIFFUSION_XL
from estimator.plan import GIB
from estimator.setup import Setup
from estimator.vocabulary import IMAGE_TASK

CARDS = ("RTX 4090", "A100 SXM 40GB", "A100 SXM 80GB")  # of 24, 40 and 80 GB
RUNS = (
    ("full", "bf16-mixed", "none"),
    ("full", "bf16-mixed", "full"),
    ("full", "bf16", "none"),
    ("full", "bf16", "full"),
    ("lora", "bf16-mixed", "none"),
    ("lora", "bf16-mixed", "full"),
)


def needed(method: str, precision: str, checkpointing: str) -> tuple[int, int]:
    """Return the bytes that one GPU needs, and the upper end of their range."""
    setup = Setup(
        model=STABLE_DIFFUSION_XL,
        engine="fsdp2",
        method=method,  # type: ignore[arg-type]
        task=IMAGE_TASK,
        lora_targets=STABLE_DIFFUSION_XL.all_linear,
        precision=precision,  # type: ignore[arg-type]
        checkpointing=checkpointing,  # type: ignore[arg-type]
        expandable_segments=True,
        processes_per_node=1,
    )
    estimate, _ = memory.needs(setup)
    return estimate.likely_bytes, estimate.upper_bytes


def table() -> str:
    """Build rows of method, precision, checkpointing, need in GiB, and each card."""
    sizes = {card: hardware.gpu(card).usable_bytes or 0 for card in CARDS}
    titles = [f"{card}, {size / GIB:.1f} GiB" for card, size in sizes.items()]
    lines = [
        f"| Method | Precision | Checkpointing | Needs, at most | {' | '.join(titles)} |",
        "|---|---|---|---|" + "---|" * len(CARDS),
    ]
    for method, precision, checkpointing in RUNS:
        likely, most = needed(method, precision, checkpointing)
        fits = ["fits" if likely <= size else "no" for size in sizes.values()]
        need = f"{likely / GIB:.1f} GiB, {most / GIB:.1f}"
        row = (method, precision, "on" if checkpointing == "full" else "off", need, *fits)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)
