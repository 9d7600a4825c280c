"""Memory of logits and cross-entropy, often the largest part with a vocabulary of 128,000."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.memory import implementations
from estimator.memory.shape import Part
from estimator.memory.states import computing
from estimator.setup import Setup
from estimator.vocabulary import TASKS

# launchers/dataset/batches.py, LOSS_CHUNK: positions whose logits are in fp32 at a time
DEEPSPEED_LOSS_POSITIONS = 1024
# litgpt/finetune/full.py: fp32 logits, a contiguous copy without the last position, its log-softmax, and
# the gradient's first piece next to the 16-bit logits.
LITGPT_FULL = 14

# torch.distributed.tensor.parallel.loss_parallel: four fp32 tensors of a process's share of the logits
LOSS_PARALLEL = 16

CALLER_HOLDS = 14  # 12 B a logit and the 16-bit logits, which the caller still holds


@dataclass(frozen=True, slots=True)
class Logits:
    """Bytes of logits and loss in one process, for one micro batch."""

    peak: int
    summed: int = 0  # live while the head's gradients of two chunks are added
    head_gradient: int = 0  # of the head at that time: three copies
    held: int = 0  # still live in the backward pass of the blocks
    unfitting: int = 0  # additionally reserved, as a freed block is too small for the next tensor


def loss_bytes(setup: Setup, part: Part, tokens: int) -> Logits:
    """Return the bytes of logits, cross-entropy and their gradients for the tokens of one micro batch.

    plain: the fp32 logits' log-softmax, its gradient from the loss and the gradient that it passes on,
    12 B a logit; 2 more where the caller still holds the 16-bit logits (``data/implementations.csv``). Those
    2 B per logit cannot be reused for a 4 B copy when freed, so the allocator reserves both.
    litgpt with adapters: Lightning turns the logits to fp32 while the last step's are still referenced: 4 +
    2 + 4. A quantized head is dequantized for each piece of the logits, before they are turned.
    chunked (torchtune): the logits and the fp32 log-softmax of every chunk stay, one chunk has an fp32 copy
    more: 6 + 4 / chunks. Compiled: 2 + 2 / chunks (torchtune), or 4 (torchtitan compiles the whole loss).
    When the head's gradients of the first two chunks are added up, there are three of it and the other
    chunks' logits.
    Divided over the vocabulary by torch's loss_parallel: four fp32 tensors of a process's share.
    kernel: one kernel on the 16-bit logits, which puts the gradient in their place (flash-attn,
    losses/cross_entropy.py, inplace_backward; Unsloth's Triton kernel): logits and gradient, 4 B. Under the
    Trainer their shifted copy, which the gradient replaces, and accelerate's fp32 copy of what the model
    returns (utils/operations.py, ConvertOutputsToFp32): 8 B; in loops without accelerate 6 B.
    LLaMA-Adapter v2 keeps what the head's scale is trained on; behind it the logits, their gradient, that
    before the scale, and the product whose sum is the scale's own are alive.
    recomputed (launchers/dataset/batches.py): logits, 12 B for each logit of one piece and the
    gradients of the others; or logits, their gradient in pieces and joined. liger: one piece of the logits,
    which their gradient replaces, the hidden states' gradient and the head's (Liger-Kernel 0.8.5,
    ops/fused_linear_cross_entropy.py). fused: pieces of the logits, and
    the head's gradient in fp32 (Liger-Kernel, ops/fused_linear_cross_entropy.py: about T h / V tokens each).
    liger with preferences (launchers/engines/loop/head.py): the hidden states' gradient and the head's; one
    piece of the logits with 12 B a logit more, or with the head's gradient of that piece.
    """
    model, size = setup.model, computing(setup)
    if not part.head or not part.last:
        return Logits(0)
    code = implementations.of(setup)
    # torch's loss_parallel and Megatron's cross-entropy leave them divided over the vocabulary
    divided = 1 if code.whole_logits else setup.tensor
    elements = tokens * -(-model.vocab // divided)
    head = 0 if setup.adapters else part.head
    if setup.loss == "fused" and setup.engine_version == "liger" and TASKS[setup.task].preferences:
        chunk = min(tokens, DEEPSPEED_LOSS_POSITIONS) * model.vocab
        piece = max((12 + size) * chunk, size * (chunk + head))
        return Logits(piece + size * (tokens * model.hidden + head))
    if setup.loss == "fused" and setup.engine_version == "liger":
        pieces = -(-model.vocab // model.hidden)
        chunk = min(tokens, 1 << (-(-tokens // pieces) - 1).bit_length())  # the next power of two
        head_gradient = (
            head if size == 4 else 0
        )  # a piece's part of the head's gradient; in 16 bits added in place
        return Logits(size * (chunk * model.vocab + tokens * model.hidden + head + head_gradient))
    if setup.loss == "fused":
        chunk = max(1, tokens * model.hidden // model.vocab)
        return Logits((size + 8) * chunk * model.vocab // setup.tensor + 4 * head)
    if setup.loss == "recomputed":
        chunk = min(elements, DEEPSPEED_LOSS_POSITIONS * model.vocab)
        if setup.method == "adapter-v2":
            return Logits(max(3 * size * elements + (12 - size) * chunk, 5 * size * elements))
        return Logits(max(2 * size * elements + (12 - size) * chunk, 3 * size * elements))
    if setup.engine == "litgpt" and setup.adapters:
        whole_head = 0 if setup.quantization == "none" else size * part.untied_head
        scaled = size * elements if setup.method == "adapter-v2" else 0
        return Logits(max((8 + size) * elements, (4 + size) * elements + whole_head) + scaled)
    if setup.engine == "litgpt":
        return Logits(LITGPT_FULL * elements)
    if setup.loss == "kernel":
        return Logits(code.kernel_loss * elements)
    if setup.loss == "plain":
        if setup.tensor > 1 and setup.engine == "torchtitan" and not code.whole_logits:
            return Logits(LOSS_PARALLEL * elements)
        caller = 2 * elements  # the 16-bit logits: still referenced by the caller, or too small to be reused
        if code.plain_loss == CALLER_HOLDS:
            return Logits(code.plain_loss * elements, held=caller)
        return Logits(code.plain_loss * elements, unfitting=caller)
    if setup.compile and code.compiled_loss:
        return Logits(2 * size * elements)
    chunks = setup.loss_chunks
    largest = size * elements + size * elements // chunks
    if not setup.compile:
        largest = (size + 4) * elements + 4 * elements // chunks
    return Logits(largest, size * elements * max(chunks - 2, 0) // chunks, 3 * size * head)
