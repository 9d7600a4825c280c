"""One step of Llama 3.1 8B, with whatever a test changes of it."""

from typing import Any

from estimator.models import find
from estimator.setup import Setup

LLAMA = find("llama-8b")


def step(**changes: Any) -> Setup:
    values: dict[str, Any] = {"model": LLAMA, "micro_batch_size": 1, "seq_len": 2048}
    return Setup(**(values | changes))
