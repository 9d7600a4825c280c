"""Check that a conversation fits into this machine's memory, before any weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from estimator.errors import UserError
from estimator.formatting import format_bytes, format_count
from estimator.memory.generation import WEIGHT_BYTES, WEIGHTS, Batch, generation_bytes
from estimator.models import ModelSpec
from launchers.inference.finished import FinishedModel

Device = Literal["cuda", "cpu"]
CONTEXT = 4096  # length in tokens of the conversation that must fit
NEW_TOKENS = 512  # length of an answer in tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Free memory of the devices that a model is loaded onto, in bytes."""

    device: Device
    free_bytes: tuple[int, ...]  # one value per GPU, or one for the CPU

    @property
    def gpus(self) -> int:
        return len(self.free_bytes)


def pick_device(device: Literal["auto", "cuda", "cpu"]) -> Device:
    """Resolve ``auto`` to GPUs if there are any, else the CPU. Raises UserError if GPUs are missing."""
    if device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if device == "cuda":
        raise UserError("There is no GPU that PyTorch can use.", "Use --device cpu.")
    return "cpu"


def conversation_batch(spec: ModelSpec, tokens: int, new_tokens: int) -> Batch:
    """Return a batch of one sequence of ``tokens``, limited by the model, with ``new_tokens`` generated."""
    longest = min(max(tokens, new_tokens + 1), spec.max_seq_len or tokens)
    new = min(new_tokens, longest - 1)
    return Batch(sequences=1, prompt_tokens=longest - new, new_tokens=new)


def free_memory(device: Device) -> Memory:
    """Measure the memory that this process can still allocate, on all visible GPUs or on the CPU."""
    if device == "cuda":
        import torch

        free = tuple(int(torch.cuda.mem_get_info(index)[0]) for index in range(torch.cuda.device_count()))
        return Memory(device=device, free_bytes=free)
    import psutil

    from estimator.hardware import local_machine

    machine = psutil.virtual_memory()
    limit = local_machine.detect().ram_bytes - psutil.Process().memory_info().rss
    return Memory(device=device, free_bytes=(min(int(machine.available), limit),))


def needed_bytes(spec: ModelSpec, batch: Batch, memory: Memory, *, copies: int = 1) -> int:
    """Estimate the memory of the fullest device with ``copies`` of the weights and one batch."""
    parts = _parts(spec, batch, memory)
    return sum(parts.values()) + (copies - 1) * parts[WEIGHTS]


def _parts(spec: ModelSpec, batch: Batch, memory: Memory) -> dict[str, int]:
    """Estimate the memory of the fullest device by category, a vision tower among the weights."""
    parts = generation_bytes(spec, batch, gpus=memory.gpus, device=memory.device)
    tower = spec.vision
    if tower is not None:
        parameters = tower.parameters + tower.projector_parameters
        parts[WEIGHTS] += parameters * WEIGHT_BYTES[memory.device]
    return parts


def check_memory(
    name: str, spec: ModelSpec, batch: Batch, memory: Memory, *, copies: int = 1, advice: Sequence[str] = ()
) -> int:
    """Return the estimated bytes of the fullest device. Raises UserError if they exceed its free memory.

    Parameters
    ----------
    copies:
        Models of this shape that are loaded at once.
    advice:
        How to need less memory, in terms of the command's options.
    """
    required = needed_bytes(spec, batch, memory, copies=copies)
    free = min(memory.free_bytes)
    if required > free:
        weights = copies * _parts(spec, batch, memory)[WEIGHTS]
        memory_kind = (
            "this machine's memory"
            if memory.device == "cpu"
            else f"each of {format_count(memory.gpus, 'GPU')}"
        )
        models = f" of {copies} models" if copies > 1 else ""
        raise UserError(
            f"{name} needs {format_bytes(required)} in {memory_kind} ({format_bytes(weights)} for the weights"
            f"{models}, {format_bytes(required - weights)} to answer {batch.tokens:,} tokens); "
            f"{format_bytes(free)} are free.",
            f"Use {', or '.join(advice)}." if advice else "",
        )
    return required


def check_conversation(
    finished: FinishedModel, device: Device, *, new_tokens: int = NEW_TOKENS, with_base: bool = False
) -> int:
    """Check that a conversation of ``CONTEXT`` tokens fits into the free memory: :func:`check_memory`."""
    spec = finished.spec()
    second = with_base and not finished.is_adapter  # an adapter can be disabled
    return check_memory(
        finished.name,
        spec,
        conversation_batch(spec, CONTEXT, new_tokens),
        free_memory(device),
        copies=1 + second,
        advice=[
            *(["no --with-base"] if second else []),
            *(["--device cpu"] if device == "cuda" else ["a machine with more memory"]),
        ],
    )
