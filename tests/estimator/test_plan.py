"""A Plan survives JSON both ways, whatever is in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estimator import Job, Layout, Plan, Target, plan
from estimator.models import find
from estimator.plan import SCHEMA_VERSION, LearningRate, MemoryEstimate, Override, Prediction, Request

WORDS = st.text(max_size=20)
COUNTS = st.integers(1, 2**40)
FIGURES = st.floats(0, 1e15, allow_nan=False)
PLAIN = st.builds(
    MemoryEstimate,
    categories=st.lists(st.tuples(WORDS, COUNTS), max_size=4).map(tuple),
    needs_range=st.tuples(COUNTS, COUNTS),
    shows_bytes=COUNTS,
    shows_range=st.tuples(COUNTS, COUNTS),
    capacity_bytes=st.none() | COUNTS,
    host_bytes=COUNTS,
    needs_basis=WORDS,
    shows_basis=WORDS,
    uncorrected=st.none(),
    outside_bytes=st.none() | COUNTS,
)
MEMORIES = PLAIN | st.builds(replace, PLAIN, uncorrected=PLAIN)
PLANS = st.builds(
    Plan,
    model=WORDS,
    parameters=COUNTS,
    method=st.sampled_from(["full", "lora", "qlora", "dora"]),
    engine=WORDS,
    target=st.sampled_from(["local", "kubernetes", "batch", "catalogue"]),
    request=st.builds(
        Request,
        gpu_type=st.none() | WORDS,
        instance_type=st.none() | WORDS,
        cloud=st.none() | WORDS,
        node_labels=st.lists(st.tuples(WORDS, WORDS), max_size=2).map(tuple),
    ),
    layout=st.builds(Layout, seq_len=COUNTS, virtual_stages=COUNTS, replicate=COUNTS),
    prediction=st.builds(
        Prediction,
        memory=MEMORIES,
        flops_per_token=FIGURES,
        peak_flops_per_gpu=st.none() | FIGURES,
        tokens_per_second=st.none() | FIGURES,
        hours=st.none() | FIGURES,
        usd_per_hour=st.none() | FIGURES,
        usd=st.none() | FIGURES,
        tokens=st.none() | COUNTS,
        mfu=st.none() | FIGURES,
        tokens_per_second_range=st.none() | st.tuples(FIGURES, FIGURES),
    ),
    why=st.lists(WORDS, max_size=3).map(tuple),
    overrides=st.lists(st.builds(Override), max_size=2).map(tuple),
    rejected=st.lists(WORDS, max_size=3).map(tuple),
    learning_rates=st.lists(st.builds(LearningRate, value=FIGURES), max_size=2).map(tuple),
    schema=st.just(SCHEMA_VERSION),
)


@given(PLANS)
@settings(max_examples=50, deadline=None)
def test_any_plan_survives_json_both_ways(made: Plan) -> None:
    assert Plan.from_json(made.to_json()) == made


def test_a_plan_of_another_schema_is_refused() -> None:
    chosen = plan(Job(model=find("llama-8b"), method="lora"), Target(kind="kubernetes"))
    other = replace(chosen, schema=SCHEMA_VERSION - 1)
    with pytest.raises(ValueError, match=f"schema {SCHEMA_VERSION - 1}; this version reads {SCHEMA_VERSION}"):
        Plan.from_json(other.to_json())
