"""The model table: counts as published, names, sources."""

import math

import pytest

from estimator import models
from estimator.errors import UserError
from estimator.models import find


# Rows without a published count are counted in transformers' own code by test_parameters.py
@pytest.mark.parametrize("name", [n for n in models.names() if find(n).published_parameters])
def test_computed_parameters_equal_the_published_count(name: str) -> None:
    model = find(name)
    assert model.parameters == model.published_parameters


@pytest.mark.parametrize("name", models.names())
def test_every_model_row_has_a_source(name: str) -> None:
    assert find(name).source


@pytest.mark.parametrize(
    ("alias", "hf_id"),
    [
        ("LLAMA-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("mistral-8b", "mistralai/Ministral-8B-Instruct-2410"),
        ("codestral", "mistralai/Codestral-22B-v0.1"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
    ],
)
def test_names_aliases_and_hugging_face_ids_find_the_model(alias: str, hf_id: str) -> None:
    assert find(alias).hf_id == hf_id


def test_an_unknown_model_gets_similar_names_as_suggestions() -> None:
    with pytest.raises(UserError) as caught:
        find("lama-8b")
    assert "'lama-8b'" in caught.value.problem
    assert "llama-8b" in caught.value.advice


@pytest.mark.parametrize("name", [n for n in models.names() if find(n).published_active_parameters])
def test_active_parameters_match_the_model_card(name: str) -> None:
    """Cards round or cut to the digits that they show, with or without the input embedding."""
    model = find(name)
    published = model.published_active_parameters or 0
    digits = 10 ** min(k for k in range(7, 10) if published % 10 ** (k + 1))
    counts = (model.active_parameters, model.active_parameters - model.vocab * model.hidden)
    assert published in {f(count / digits) * digits for count in counts for f in (math.floor, round)}


def test_every_model_with_experts_has_published_active_parameters() -> None:
    with_experts = [n for n in models.names() if find(n).experts and find(n).published_parameters]
    assert len(with_experts) > 8
    assert all(find(name).published_active_parameters for name in with_experts)
