"""Logits and cross-entropy, the largest single surprise at vocabularies of 128,000."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.memory import implementations
from estimator.memory.shape import Part
from estimator.memory.states import computing
from estimator.setup import Setup

# launchers/engines/deepspeed_batches.py, LOSS_CHUNK: positions whose logits are in fp32 at a time
DEEPSPEED_LOSS_POSITIONS = 1024
# litgpt/finetune/full.py: fp32 logits, a contiguous copy without the last position, its log-softmax, and
# the gradient's first piece beside the 16-bit logits.
LITGPT_FULL = 14


@dataclass(frozen=True, slots=True)
class Logits:
    """Bytes at the loss."""

    peak: int
    head_gradient: int  # of the head's weight, where pieces of the logits go backward one by one
    unfitting: int  # that the allocator needs more, because a freed block is too small for the next


def loss_bytes(setup: Setup, part: Part, tokens: int) -> Logits:
    """Logits, cross-entropy and their gradients for the tokens of one micro batch.

    plain: the fp32 logits' log-softmax, its gradient from the loss and the gradient that it passes on,
    12 B a logit; 2 more where the caller still holds the 16-bit logits (``data/implementations.csv``). Those
    2 B a logit can't take a 4 B copy when they are freed, so the allocator reserves them beside.
    litgpt with adapters: Lightning turns the logits to fp32 while the last step's are still referenced: 4 +
    2 + 4. A quantised head is dequantised for each piece of the logits, before they are turned.
    chunked (torchtune): the logits and the fp32 log-softmax of every chunk stay, one chunk has two more fp32
    copies: 6 + 8 / chunks. Compiled: 2 + 2 / chunks (torchtune), or 4 (torchtitan compiles the whole loss).
    The head's gradient adds up chunk by chunk: two of it.
    recomputed (launchers/engines/deepspeed_batches.py): logits, their gradient in pieces and joined, 12 B for
    each logit of one piece. fused: pieces of the logits, and the head's gradient in fp32 (Liger-Kernel,
    ops/fused_linear_cross_entropy.py: pieces of about T h / V tokens).
    """
    model, size = setup.model, computing(setup)
    if not part.head or not part.last:
        return Logits(0, 0, 0)
    code = implementations.of(setup)
    # torch's loss_parallel and Megatron's cross-entropy leave them divided over the vocabulary
    divided = 1 if code.whole_logits else setup.tensor
    elements = tokens * -(-model.vocab // divided)
    head = 0 if setup.adapters else part.head
    if setup.loss == "fused":
        piece = max(1, tokens * model.hidden // model.vocab)
        return Logits((size + 8) * piece * model.vocab // setup.tensor, 4 * head, 0)
    if setup.loss == "recomputed":
        piece = min(elements, DEEPSPEED_LOSS_POSITIONS * model.vocab)
        return Logits(3 * size * elements + 12 * piece, 0, 0)
    if setup.engine == "litgpt" and setup.adapters:
        whole_head = 0 if setup.quantization == "none" else size * part.own_head
        return Logits(max((8 + size) * elements, (4 + size) * elements + whole_head), 0, 0)
    if setup.engine == "litgpt":
        return Logits(LITGPT_FULL * elements, 0, 0)
    if setup.loss == "plain":
        freed = 0 if code.plain_loss == 14 else 2  # 14: the caller still holds the 16-bit logits
        return Logits(code.plain_loss * elements, 0, freed * elements)
    if setup.compile and code.compiled_loss:
        return Logits(2 * size * elements, 0, 0)
    if setup.compile:
        return Logits(size * elements + size * elements // setup.loss_chunks, 2 * size * head, 0)
    kept = (size + 4) * elements + 8 * elements // setup.loss_chunks
    return Logits(kept, 2 * size * head, 0)
