"""Fixed plans for tests, without the planner: small ones for this machine and a large one for a cluster."""

from __future__ import annotations

from typing import Any

from estimator.errors import UserError
from estimator.plan import GIB, Layout, MemoryEstimate, Plan, Prediction, Request


def make_plan(parameters: dict[str, Any], backend: str) -> Plan:
    """Return a plan that repeats its arguments; a model called "none" is a user error."""
    model, gpus = parameters.get("model", "tiny-llama"), parameters.get("gpus") or 8
    if model == "none":
        raise UserError("There is no model named none.", "Take one of: tiny-llama, llama-*.")
    on_gpus = backend != "local" or model.startswith("llama")
    nodes = int(parameters.get("nodes") or 1)
    processes = gpus if on_gpus else 1
    return Plan(
        model=model,
        parameters=8_030_261_248 if on_gpus else 3_000_000,
        method=parameters.get("method") or "full",
        engine="torchtune",
        target=backend,  # type: ignore[arg-type]
        request=Request(
            nodes=nodes,
            gpus_per_node=gpus if on_gpus else 0,
            gpu_type="A100-80GB" if on_gpus else None,
            cpu=96 if on_gpus else 2,
            memory_mib=1_000_000 if on_gpus else 2048,
            shared_memory_mib=65536 if on_gpus else 512,
            disk_mib=200_000 if on_gpus else 4096,
            instance_type="p4de.24xlarge" if on_gpus else None,
            cloud="aws" if on_gpus else None,
        ),
        layout=Layout(
            device="cuda" if on_gpus else "cpu",
            nodes=nodes,
            processes_per_node=processes,
            sharding="fsdp" if nodes * processes > 1 else "none",
            micro_batch_size=1,
            accumulation=1,
            seq_len=2048,
            activation_checkpointing=on_gpus,
            precision="bf16" if on_gpus else "fp32",
            optimizer="adamw",
        ),
        prediction=Prediction(
            memory=MemoryEstimate(
                categories=(
                    ("weights", 2 * GIB if on_gpus else 12 << 20),
                    ("gradients", 2 * GIB if on_gpus else 12 << 20),
                    ("optimizer", 8 * GIB if on_gpus else 24 << 20),
                    ("activations", 20 * GIB if on_gpus else 200 << 20),
                    ("runtime", 1 * GIB if on_gpus else 350 << 20),
                ),
                needs_range=(30 * GIB, 36 * GIB) if on_gpus else (550 << 20, 750 << 20),
                shows_bytes=34 * GIB if on_gpus else 600 << 20,
                shows_range=(31 * GIB, 40 * GIB) if on_gpus else (550 << 20, 750 << 20),
                capacity_bytes=80 * GIB if on_gpus else 4 * GIB,
                host_bytes=100 * GIB if on_gpus else 900 << 20,
                needs_basis="a table in the tests",
                shows_basis="a table in the tests",
                formulas="of the tests",
                outside_bytes=1 * GIB if on_gpus else None,
            ),
            flops_per_token=6.0 * (8e9 if on_gpus else 3e6),
            peak_flops_per_gpu=312e12 if on_gpus else None,
            tokens_per_second=24000.0 if on_gpus else None,
            hours=1.5 if on_gpus else None,
            usd_per_hour=40.97 if on_gpus else None,
            usd=61.45 if on_gpus else None,
            throughput_basis="40 % MFU, as measured on A100",
        ),
        why=("The optimizer's states are sharded over all GPUs.", "The cheapest machine that fits."),
        rejected=("g5.48xlarge: 24 GiB a GPU, 34 GiB needed", "p5.48xlarge: fits, but 2.4 times the price"),
    )
