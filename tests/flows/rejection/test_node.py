"""Nodes, GPUs and batches of generation from the plan."""

from __future__ import annotations

from dataclasses import replace

from estimator.inference.generation import Sampling, plan_generation
from estimator.models import find
from flows.rejection import node
from tests.decorators.backends.plans import planned


def test_generation_uses_the_nodes_gpus_and_batch_of_the_plan() -> None:
    plan = planned("llama-8b", "full", "H100", 1)
    assert node.drawing_nodes(plan) == [0]
    assert node._gpus(plan) == plan.request.gpus_per_node
    assert node.batch_limit(plan).sequences == node.CPU_SEQUENCES
    sampling = Sampling(
        prompts=5000, held_out=9, answers=4, prompt_tokens=256, new_tokens=256, by_function=True, nodes=3
    )
    generation = plan_generation(plan, find("llama-8b"), sampling)
    plan = replace(plan, generation=generation, request=replace(plan.request, gpus_per_node=8))
    assert node.drawing_nodes(plan) == [0, 1, 2]
    assert node._gpus(plan) == 1
    assert node.batch_limit(plan).tokens == generation.batch_tokens
