"""Memory of logits and cross-entropy, often the largest part with a vocabulary of 128,000."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.memory import implementations
from estimator.memory.shape import Part
from estimator.memory.states import compute_size
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
    summed: int = 0  # live logits while the gradients of the head of two chunks are added
    head_gradient: int = 0  # three copies of the gradient of the head, at the same time
    held: int = 0  # still live in the backward pass of the blocks
    unfitting: int = 0  # additionally reserved, as a freed block is too small for the next tensor


def loss_bytes(setup: Setup, part: Part, tokens: int) -> Logits:
    """Return the bytes of logits, cross-entropy and their gradients for the tokens of one micro batch.

    Bytes per logit with 16-bit compute, by kind of loss:

    - plain: 12 for three fp32 tensors: the log-softmax, its gradient, and the gradient of the logits. Also 2
      for the 16-bit logits: still referenced by the caller (``data/implementations.csv``), or freed in a
      block too small for a 4-byte copy, so that the allocator reserves both. With torch's loss_parallel,
      four fp32 tensors of the process's share of the vocabulary.
    - litgpt with adapters: 4 + 2 + 4, as Lightning casts the logits to fp32 while those of the last step are
      still referenced. A quantized head is dequantized for each chunk of the logits, before the cast.
    - chunked (torchtune): 6 + 4 / chunks: logits and fp32 log-softmax of every chunk, and one more fp32 copy
      of one chunk. Compiled: 2 + 2 / chunks (torchtune), or 4 (torchtitan compiles the complete loss). While
      the gradients of the head from the first two chunks are added, three copies of that gradient and the
      logits of the other chunks are live.
    - kernel: 4 for logits and gradient, as the kernel overwrites the 16-bit logits by the gradient
      (flash-attn, losses/cross_entropy.py, inplace_backward; Unsloth's Triton kernel). With the Trainer 8:
      also the shifted copy of the logits and accelerate's fp32 copy of the model output
      (utils/operations.py, ConvertOutputsToFp32). In loops without accelerate 6.
    - recomputed (launchers/dataset/batches.py): the larger of: the logits, 12 per logit of one chunk and
      the gradients of the other chunks; the logits and their gradient, in chunks and concatenated.
      LLaMA-Adapter v2 also keeps the inputs of the head's trained scale, the gradient before the scale, and
      the product that is summed to the gradient of the scale.
    - fused: chunks of the logits, and the fp32 gradient of the head (Liger-Kernel,
      ops/fused_linear_cross_entropy.py: about T h / V tokens each).
    - fused, in the loop or with version liger (Liger-Kernel 0.8.5): one chunk of the logits, overwritten by
      its gradient, and the gradients of hidden states and head. With preferences
      (launchers/engines/loop/head.py): both gradients, and one chunk of the logits with 12 more per logit, or
      with the chunk's gradient of the head.
    """
    model, size = setup.model, compute_size(setup)
    if not part.head or not part.last:
        return Logits(0)
    code = implementations.of(setup)
    # torch's loss_parallel and Megatron's cross-entropy leave them divided over the vocabulary
    divided = 1 if code.whole_logits else setup.tensor
    elements = tokens * -(-model.vocab // divided)
    head = 0 if setup.adapters else part.head
    by_liger = setup.loss == "fused" and (setup.runs_loop or setup.engine_version == "liger")
    if by_liger and TASKS[setup.task].preferences:
        chunk = min(tokens, DEEPSPEED_LOSS_POSITIONS) * model.vocab
        piece = max((12 + size) * chunk, size * (chunk + head))
        return Logits(piece + size * (tokens * model.hidden + head))
    if by_liger:
        pieces = -(-model.vocab // model.hidden)
        chunk = min(tokens, 1 << (-(-tokens // pieces) - 1).bit_length())  # the next power of two
        # A chunk's contribution to the gradient of the head; added in place in 16 bits
        head_gradient = head if size == 4 else 0
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
