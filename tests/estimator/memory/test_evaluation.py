"""Memory of the evaluation: its constants are those of the code that evaluates, and it grows as it must."""

from __future__ import annotations

import pytest

from estimator.memory import evaluation
from estimator.memory.evaluation import inference_bytes
from estimator.models import find


def test_the_batch_and_the_loss_are_those_of_the_code_that_evaluates() -> None:
    pytest.importorskip("torch")
    from launchers.dataset import batches, measured

    assert measured.MAX_BATCH_TOKENS["cuda"] == evaluation.BATCH_TOKENS
    assert batches.LOSS_CHUNK == evaluation.LOSS_POSITIONS


@pytest.mark.parametrize("name", ["tiny-llama", "llama-8b", "llama-70b", "mixtral-8x7b"])
def test_a_copy_takes_its_weights_and_less_of_each_gpu_the_more_share_it(name: str) -> None:
    model = find(name)
    sizes = [inference_bytes(model, gpus, 2048) for gpus in (1, 2, 4, 8)]
    assert sizes[0] > 2 * model.parameters
    assert sizes[1:] == sorted(sizes[1:], reverse=True)
    assert inference_bytes(model, 1, 4096) > sizes[0]
