"""Comparison of a run's GPU kernels with plain references before the first step, and the fallback.

Checked are variable-length attention, with the model's heads, widths, window and sinks, and Liger-Kernel's
loss. The tensors are small and random; torch's random generators are not used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from estimator.errors import UserError
from estimator.formatting import format_bytes
from estimator.models import ModelSpec
from estimator.vocabulary import TASKS
from launchers.dataset.prepared import IGNORE
from launchers.engines.gathering import gather_json
from launchers.engines.loop import liger, varlen
from launchers.engines.loop.compiled import first_line
from launchers.engines.loop.model import dtype_of
from launchers.gang.job import TrainJob

Kernel = Literal["variable_length", "liger"]  # name of the setting
# Relative, of norms in bf16: correct kernels differ by up to 0.7 % (benchmarks.gpu_speed on an H200)
TOLERANCE = 3e-2
DOCUMENTS = (257, 60, 7)  # tokens; the first spans several of a kernel's blocks
WINDOW = 32  # largest window of the comparison, so that it hides tokens of the documents
LOSS_TOKENS = 8  # few, because Liger-Kernel adds up a 16-bit gradient of the weight token by token
LOSS_WIDTH = 64
_FALLBACK: dict[Kernel, str] = {
    "variable_length": "attention with a mask",
    "liger": "torch's cross entropy",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """Heads of one kind of attention. ``window`` counts the token itself; None: no window."""

    heads: int
    key_heads: int
    width: int
    value_width: int
    sinks: bool = False
    window: int | None = None


def checked(job: TrainJob, device: torch.device, report: Callable[[str], None]) -> TrainJob:
    """Return the job without the kernels that fail on some rank; every rank calls it.

    ``report``: receives one warning for each such kernel, on each rank. Raises UserError if a setting
    requires the kernel, and if the kernel left the GPU unusable.
    """
    checks: dict[Kernel, Callable[[TrainJob, torch.device], str | None]] = {}
    if varlen.applies(job):
        checks["variable_length"] = attention_fault
    elif job.settings.variable_length is True:
        _refuse_if_required(job, "variable_length", "this GPU or precision has no FlashAttention")
    if job.settings.liger and not TASKS[job.settings.task].preferences:  # whose loss is torch's own
        checks["liger"] = loss_fault
    if not checks:
        return job
    own = {name: _fault(name, check, job, device) for name, check in checks.items()}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    of_ranks = gather_json(own, device)
    changes: dict[str, bool] = {}
    for name in checks:
        faults = {rank: found[name] for rank, found in enumerate(of_ranks) if found[name] is not None}
        if faults:
            rank, fault = next(iter(faults.items()))
            where = "" if len(faults) == len(of_ranks) else f" on rank {rank}"
            _refuse_if_required(job, name, f"{fault}{where}")
            report(f"{name} off: {fault}{where}. The run continues with {_FALLBACK[name]}{_cost(job, name)}")
            changes[name] = False
    return dataclasses.replace(job, settings=job.settings.model_copy(update=changes)) if changes else job


def _fault(
    name: Kernel,
    check: Callable[[TrainJob, torch.device], str | None],
    job: TrainJob,
    device: torch.device,
) -> str | None:
    """Return what is wrong with a kernel on this rank, as a clause; None if it passes."""
    try:
        return check(job, device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if not _is_usable(device):
            raise UserError(
                f"{name}: its kernel failed and left the GPU unusable: {first_line(error)}",
                f"Set {name}: false.",
            ) from error
        return f"its kernel failed with {type(error).__name__}: {first_line(error)}"


def _is_usable(device: torch.device) -> bool:
    """Return whether the device still computes; after an invalid memory access every call fails."""
    try:
        return torch.ones(1, device=device).item() == 1
    except torch.AcceleratorError:
        return False


def _refuse_if_required(job: TrainJob, name: Kernel, fault: str) -> None:
    settings = job.settings
    required = (
        settings.variable_length is True
        if name == "variable_length"
        else name not in settings.automatic_choices
    )
    if required:
        raise UserError(f"{name}: {fault}.", f"Remove {name} from the settings, or set {name}: false.")


def _cost(job: TrainJob, name: Kernel) -> str:
    """Return what the fallback needs that the plan did not count, and how to plan for it."""
    layout = job.plan.layout
    tokens = layout.micro_batch_size * layout.seq_len
    masked = name == "variable_length"
    size = tokens * layout.seq_len if masked else tokens * job.model.spec.vocab * torch.float32.itemsize
    part = "mask" if masked else "logits"
    advice = f"--no-{name.replace('_', '-')} plans for it"
    return f", whose {part} of up to {format_bytes(size)} the plan did not count; {advice}"


def attention_fault(job: TrainJob, device: torch.device) -> str | None:
    """Return how the attention function differs from the reference, as a clause; None if it does not."""
    for shape in attention_shapes(job.model.spec):
        if fault := _difference(attention_errors(shape, device, dtype_of(job)), f"heads of {shape.width}"):
            return fault
    return None


def _difference(errors: dict[str, float], subject: str) -> str | None:
    name, error = max(errors.items(), key=lambda item: item[1] if item[1] == item[1] else float("inf"))
    if error <= TOLERANCE:
        return None
    return f"its {name} with {subject} differs from the reference by {error:.1%}"


def attention_shapes(model: ModelSpec) -> Iterator[AttentionShape]:
    """Iterate over the kinds of attention in a model's blocks."""
    if model.kv_lora_rank:
        yield AttentionShape(
            heads=model.heads,
            key_heads=model.heads,
            width=model.head_dim,
            value_width=model.v_head_dim or model.head_dim,
        )
        return

    def shape(width: int, key_heads: int, window: int | None) -> AttentionShape:
        return AttentionShape(
            heads=model.heads,
            key_heads=key_heads,
            width=width,
            value_width=width,
            sinks=model.attention_sinks,
            window=window,
        )

    width, key_heads = model.head_dim, model.kv_heads
    if model.sliding_layers:
        yield shape(width, key_heads, min(model.sliding_window or WINDOW, WINDOW))
        width, key_heads = model.global_head_dim or width, model.global_kv_heads or key_heads
    if model.sliding_layers < model.layers:
        yield shape(width, key_heads, None)


def attention_errors(
    shape: AttentionShape, device: torch.device, dtype: torch.dtype, documents: tuple[int, ...] = DOCUMENTS
) -> dict[str, float]:
    """Compare :func:`varlen.attention` with a softmax in fp32 over each document alone.

    Returns the relative errors of the result and of each gradient.
    """
    draw = torch.Generator().manual_seed(0)
    tokens = sum(documents)
    sizes = ((shape.heads, shape.width), (shape.key_heads, shape.width), (shape.key_heads, shape.value_width))
    inputs = [
        torch.randn(1, tokens, heads, width, generator=draw).to(device, dtype).transpose(1, 2)
        for heads, width in sizes
    ]
    names = ["query's gradient", "key's gradient", "value's gradient"]
    if shape.sinks:
        inputs.append(torch.randn(shape.heads, generator=draw).to(device, dtype))
        names.append("sinks' gradient")
    weight = torch.randn(1, tokens, shape.heads, shape.value_width, generator=draw).to(device, dtype)
    lengths = torch.tensor([0, *documents], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)

    def by_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *sinks: torch.Tensor) -> Any:
        options: dict[str, Any] = {"cu_seq_lens_q": lengths, "max_length_q": max(documents)}
        options |= {"sliding_window": shape.window, "s_aux": sinks[0] if sinks else None}
        return varlen.attention(None, query, key, value, None, **options)[0]

    def by_reference(*tensors: torch.Tensor) -> torch.Tensor:
        parts = zip(*(torch.split(each, list(documents), dim=2) for each in tensors[:3]), strict=True)
        return torch.cat([_plain_attention(shape, *part, *tensors[3:]) for part in parts], dim=1)

    return _errors(by_kernel, by_reference, inputs, weight, names)


def _plain_attention(
    shape: AttentionShape, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *sinks: torch.Tensor
) -> torch.Tensor:
    """Return the attention of one document, [1, tokens, heads, value_width], from all its scores."""
    groups, tokens = shape.heads // shape.key_heads, query.shape[2]
    keys, values = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    place = torch.arange(tokens, device=query.device)
    distance = place[:, None] - place[None, :]
    hidden = (distance < 0) | (distance >= (shape.window or tokens))
    scores = (query @ keys.mT * shape.width**-0.5).masked_fill(hidden, float("-inf"))
    further = [each[None, :, None, None].expand(1, shape.heads, tokens, 1) for each in sinks]
    shares = torch.cat([scores, *further], -1).softmax(-1)[..., :tokens]
    return (shares @ values).transpose(1, 2)


def loss_fault(job: TrainJob, device: torch.device) -> str | None:
    """Return how Liger-Kernel's loss differs from torch's, as a clause; None if it does not."""
    model = job.model.spec
    config = json.loads((job.model_dir / "config.json").read_text())
    soft_cap = config.get("text_config", config).get("final_logit_softcapping")
    errors = loss_errors(model.vocab, device, dtype_of(job), bias=model.head_bias, soft_cap=soft_cap)
    return _difference(errors, f"{model.vocab} classes")


def loss_errors(
    vocab: int, device: torch.device, dtype: torch.dtype, *, bias: bool, soft_cap: float | None
) -> dict[str, float]:
    """Compare Liger-Kernel's loss over narrow hidden states and the full vocabulary with torch's in fp32.

    Returns the relative errors of the loss and of each gradient.
    """
    draw = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(LOSS_TOKENS, LOSS_WIDTH), (vocab, LOSS_WIDTH), *([(vocab,)] * bias)]
    inputs = [torch.randn(*shape, generator=draw) for shape in shapes]
    inputs[1] *= LOSS_WIDTH**-0.5
    inputs = [each.to(device, dtype) for each in inputs]
    labels = torch.randint(vocab, (LOSS_TOKENS,), generator=draw)
    labels[0] = IGNORE
    labels = labels.to(device)

    def by_kernel(hidden: torch.Tensor, weight: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
        return liger.summed_cross_entropy(hidden, weight, biases[0] if biases else None, labels, soft_cap)

    def by_reference(hidden: torch.Tensor, weight: torch.Tensor, *biases: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden, weight, *biases)
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        return torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")

    names = ["hidden states' gradient", "weight's gradient", "bias's gradient"]
    return _errors(by_kernel, by_reference, inputs, torch.ones((), device=device), names)


def _errors(
    kernel: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    weight: torch.Tensor,
    names: list[str],
) -> dict[str, float]:
    """Return the relative errors of a kernel's result and gradients; the reference gets fp32 inputs.

    ``weight``: gradient of the result. ``names``: of the inputs' gradients.
    """
    results = []
    for function, dtype in ((kernel, inputs[0].dtype), (reference, torch.float32)):
        tensors = [each.detach().to(dtype).requires_grad_() for each in inputs]
        with torch.enable_grad():
            result = function(*tensors)
            gradients = torch.autograd.grad(result, tensors, weight.to(result.dtype))
        results.append([each.detach().float() for each in (result, *gradients)])
    pairs = zip(["result", *names], *results, strict=False)
    return {name: float((one - other).norm() / other.norm()) for name, one, other in pairs}
