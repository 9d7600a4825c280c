"""Which models give a reward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from launchers.models.causal import gives_rewards


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["LlamaForSequenceClassification"], True),
        (["LlamaForCausalLM", "LlamaForSequenceClassification"], True),
        (["LlamaForCausalLM"], False),
        ([], False),
        (None, False),
    ],
)
def test_a_model_with_a_head_for_whole_texts_gives_rewards(
    architectures: list[str] | None, expected: bool
) -> None:
    assert gives_rewards(SimpleNamespace(architectures=architectures)) == expected
