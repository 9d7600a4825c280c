"""finetune estimate for a diffusion model: what is known of it, and "unknown" for what is not."""

from __future__ import annotations

from typing import Any

from estimator import hardware
from estimator.cli import output
from estimator.cli.options import PlaceOptions, SetupOptions
from estimator.errors import UserError
from estimator.models.diffusion import DTYPE_BYTES, DiffusionSpec, unet_activation_bytes
from estimator.plan import gib

PRECISIONS = ("fp32", "bf16")  # of weights and activations alike; what autocast keeps is not known
MOMENTS = {"adamw": 2, "sgd": 1}  # copies of the trained weights that the optimizer keeps


def show(
    model: DiffusionSpec,
    options: SetupOptions,
    place: PlaceOptions,
    image_size: int,
    *,
    as_json: bool,
    as_csv: bool,
    exact: bool,
) -> None:
    """Print a diffusion model's estimate; raises UserError for an option's value that can't be used."""
    if exact:
        raise UserError(
            f"Exact mode can't trace {model.name}: it knows language models.", "Leave --exact out."
        )
    if options.micro_batch_size < 1:
        raise UserError(f"--micro-batch-size {options.micro_batch_size} must be a whole number above 0.")
    gpu = hardware.gpu(place.gpu) if place.gpu else None
    parts, unknown = memory_of(model, options, image_size)
    known_bytes = sum(size for size in parts.values() if size is not None)
    capacity = gpu.usable_bytes if gpu else None
    values: dict[str, Any] = {
        "model": {
            "name": model.name,
            "parameters": model.parameters,
            "trained_parameters": model.trained_parameters,
            "components": dict(model.components),
        },
        "memory": {
            "categories": parts,
            "at_least_bytes": known_bytes,
            "capacity_bytes": capacity,
            # More parts are needed than are known: what is known can only show that it does not fit
            "fits": False if capacity is not None and known_bytes > capacity else None,
        },
        "unknown": unknown,
        "source": model.source,
    }
    if as_json:
        output.print_json(values)
    elif as_csv:
        sizes = {f"{name.replace(' ', '_')}_bytes": size for name, size in parts.items()}
        output.print_csv(
            [{"model": model.name, **sizes, "at_least_bytes": known_bytes, "capacity_bytes": capacity}]
        )
    else:
        _print(model, values, gpu.name if gpu else "")


def memory_of(
    model: DiffusionSpec, options: SetupOptions, image_size: int
) -> tuple[dict[str, int | None], list[str]]:
    """Bytes of one process by category (None where unknown), and a clause for each thing that is unknown."""
    precision = options.precision or "bf16"
    parts: dict[str, int | None] = {
        "weights": None,
        "gradients": None,
        "optimizer": None,
        "activations": None,
    }
    unknown = ["runtime and fragmentation: no run of such a model was published with enough detail"]
    if precision not in PRECISIONS:
        unknown.append(f"all of its memory in {precision}; {' and '.join(PRECISIONS)} are known")
    elif options.method != "full":
        parts["weights"] = DTYPE_BYTES[precision] * model.parameters
        unknown.append(f"gradients, optimizer and activations of {options.method}; full is known")
    else:
        size, trained = DTYPE_BYTES[precision], model.trained_parameters
        parts |= {"weights": size * model.parameters, "gradients": size * trained}
        if options.optimizer in MOMENTS:
            parts["optimizer"] = MOMENTS[options.optimizer] * size * trained
        else:
            unknown.append(f"states of {options.optimizer}; {' and '.join(MOMENTS)} are known")
        if options.checkpointing in (None, "none"):
            parts["activations"] = unet_activation_bytes(
                image_size, image_size, options.micro_batch_size, precision
            )
        else:
            unknown.append("activations with checkpointing; without it they are known")
    unknown.append("speed and price")
    return parts, unknown


def _print(model: DiffusionSpec, values: dict[str, Any], gpu: str) -> None:
    from rich.table import Table

    console = output.console()
    console.print(f"[bold]{model.name}[/bold]: {model.parameters / 1e9:.2f} B parameters")
    components = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for number, (name, count) in enumerate(model.components):
        components.add_row(name, f"{count / 1e6:,.1f} M", "trained" if number == 0 else "frozen")
    console.print(components)
    console.print()
    console.print("Memory of one GPU, not sharded", style="bold")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    memory = values["memory"]
    for name, size in memory["categories"].items():
        table.add_row(name, "unknown" if size is None else gib(size))
    console.print(table)
    text = f"at least {gib(memory['at_least_bytes'])}"
    if memory["capacity_bytes"] is not None:
        text += f", of the {gpu}'s {gib(memory['capacity_bytes'])}"
        text += ": [red]DOES NOT FIT[/red]" if memory["fits"] is False else ""
    console.print(f"[bold]{text}[/bold]")
    for clause in values["unknown"]:
        console.print(f"unknown: {clause}")
