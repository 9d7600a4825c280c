from typing import Any

import pytest

from estimator.models import two_kinds
from estimator.models.config_reader import ConfigReader

CONFIG: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "num_global_key_value_heads": 2,
}
OVERRIDE = {"per_layer_config": {"1": {"num_key_value_heads": 4}}}


@pytest.mark.parametrize(
    ("changes", "heads"),
    [
        ({"attention_k_eq_v": True}, 2),
        ({"attention_k_eq_v": False}, 0),
        ({"attention_k_eq_v": True} | OVERRIDE, 4),
        ({"attention_k_eq_v": False} | OVERRIDE, 4),
    ],
)
def test_global_kv_heads_differ_only_in_blocks_whose_keys_are_values(
    changes: dict[str, Any], heads: int
) -> None:
    reader = ConfigReader(CONFIG | changes, "mine")
    assert two_kinds.fields(reader, "gemma4_text", 2, 64)["global_kv_heads"] == heads
