"""What is drawn by the seed of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a tenth of a second to import; the flow's processes need the names only
    import numpy as np


def random_stream(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """One stream a purpose, so that a change to one leaves the others as they are."""
    import numpy as np

    return np.random.Generator(np.random.PCG64([seed, int.from_bytes(purpose.encode(), "big"), number]))
