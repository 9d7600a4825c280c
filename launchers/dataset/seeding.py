"""Random numbers derived from the seed of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # takes a tenth of a second to import; the flow's processes need only the names
    import numpy as np


def random_stream(seed: int, purpose: str, number: int = 0) -> np.random.Generator:
    """Create a random generator for one purpose; streams of different purposes are independent."""
    import numpy as np

    return np.random.Generator(np.random.PCG64([seed, int.from_bytes(purpose.encode(), "big"), number]))
