"""Families that are known by their names alone."""

from __future__ import annotations

import pytest

from estimator.errors import UserError
from estimator.job import Job, Target
from estimator.models import FAMILIES, hf_config, untried
from estimator.planning.planner import plan

HELIUM = {
    "model_type": "helium",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def test_the_untried_table_matches_transformers_and_excludes_tested_families() -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    rows = untried.classes()
    assert {family: CLASSES.get(family) for family in rows} == rows
    assert not rows.keys() & FAMILIES.keys()


def test_only_plans_of_untested_families_have_a_note() -> None:
    lines = {}
    for family in ("helium", "llama"):
        spec = hf_config.to_spec(HELIUM | {"model_type": family}, "mine")
        chosen = plan(
            Job(model=spec, engine="fsdp2", seq_len=64, global_batch_size=8), Target(kind="catalogue")
        )
        lines[family] = [line for line in chosen.why if "untried" in line]
        assert not any("planned only" in line for line in chosen.why)
    assert len(lines["helium"]) == 1
    assert not lines["llama"]


def test_experts_of_an_untested_family_are_counted() -> None:
    dense = hf_config.to_spec(HELIUM | {"model_type": "olmoe"}, "mine")
    experts = {"num_experts": 8, "num_experts_per_tok": 2}
    routed = hf_config.to_spec(HELIUM | {"model_type": "olmoe"} | experts, "mine")
    assert (routed.experts, routed.experts_per_token) == (8, 2)
    assert routed.linear_parameters - dense.linear_parameters == 2 * 7 * 3 * 64 * 96


@pytest.mark.parametrize("family", ["t5", "roberta", "mllama"])
def test_a_family_that_is_not_a_text_decoder_is_refused(family: str) -> None:
    with pytest.raises(UserError, match="not supported"):
        hf_config.to_spec(HELIUM | {"model_type": family}, "mine")


def test_a_missing_field_of_an_untested_family_is_named_in_the_error() -> None:
    with pytest.raises(UserError, match="no intermediate_size"):
        hf_config.to_spec({k: v for k, v in HELIUM.items() if k != "intermediate_size"}, "mine")
