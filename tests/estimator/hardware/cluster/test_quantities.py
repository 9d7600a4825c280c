"""Amounts as Kubernetes writes them, read as its own client reads them."""

from __future__ import annotations

import pytest

from estimator.errors import UserError
from estimator.hardware.cluster.quantities import quantity

WRITTEN = (
    *("0", "8", "7910m", "0.1", ".5", "2.", "+1", "-1", "100m", "1e3", "1E3", "2e-3", "12e+6"),
    *(f"1.5{unit}" for unit in "numkMGTPE"),
    *(f"96{unit}" for unit in ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")),
    *("123456789Ki", "0.25Gi"),
)


@pytest.mark.parametrize("text", WRITTEN)
def test_quantities_are_parsed_like_the_kubernetes_client_does(text: str) -> None:
    parse = pytest.importorskip("kubernetes.utils").parse_quantity
    assert quantity(text) == float(parse(text))


@pytest.mark.parametrize(
    "text", ["", "Gi", "1Gib", "1 Gi", "1e", "ten", "1mm", "1.2.3", "nan", "inf", "1e999"]
)
def test_invalid_quantities_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not a Kubernetes quantity"):
        quantity(text)
