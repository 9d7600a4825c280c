"""A model that does not fit in memory is refused with the sizes before it is loaded."""

from __future__ import annotations

import pytest

from estimator import models
from estimator.errors import UserError
from estimator.plan import GIB
from launchers.inference import memory
from launchers.inference.memory import Memory


def check(free_gib: float, *, gpus: int = 1, copies: int = 1) -> int:
    spec = models.find("llama-8b")
    batch = memory.conversation_batch(spec, 4096, 512)
    free = Memory(device="cuda", free_bytes=(int(free_gib * GIB),) * gpus)
    return memory.check_memory("mine", spec, batch, free, copies=copies, advice=["--device cpu"])


def test_an_8b_model_fits_one_gpu_of_24_gib_but_not_with_its_base_and_not_16_gib() -> None:
    assert 15 * GIB < check(24) < 20 * GIB
    with pytest.raises(UserError, match=r"weights of 2 models.*4,096 tokens.*24.0 GiB are free"):
        check(24, copies=2)
    with pytest.raises(UserError, match=r"(?s)mine needs .*Use --device cpu"):
        check(15)
    assert check(15, gpus=2) < check(24)


def test_a_conversation_is_no_longer_than_the_context_of_the_model() -> None:
    spec = models.find("tiny-llama")
    batch = memory.conversation_batch(spec, 10**6, 10**6)
    assert batch.tokens == spec.max_seq_len
    assert batch.prompt_tokens >= 1


def test_free_memory_is_below_the_total_memory_of_the_machine() -> None:
    import psutil

    free = memory.free_memory("cpu")
    assert 0 < free.free_bytes[0] < psutil.virtual_memory().total
    assert memory.pick_device("cpu") == "cpu"
