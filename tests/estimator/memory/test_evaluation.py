"""Memory of the evaluation: its constants are those of the code that evaluates, and it grows as it must."""

from __future__ import annotations

import pytest

from estimator.memory import evaluation


def test_batch_and_loss_constants_match_the_evaluation_code() -> None:
    pytest.importorskip("torch")
    from launchers.dataset import batches, measured

    assert measured.MAX_BATCH_TOKENS["cuda"] == evaluation.BATCH_TOKENS
    assert batches.LOSS_CHUNK == evaluation.LOSS_POSITIONS
