"""Every family supported by the loop, on tiny models: packed documents, and complete runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from estimator.models import architectures, hf_config
from launchers.engines.loop.families import blocks, expert_blocks
from launchers.models import causal
from tests.launchers.engines.loop import families
from tests.launchers.engines.loop.families import SAME, Proof

# A mixture of experts, capped scores, attention sinks, tensors renamed always and in some checkpoints: with
# every change. The rest, and
# ZeRO-3, which takes as long as both others, run every night; benchmarks/support_table.py runs every family
# with it.
DIFFERENT = ("mixtral", "gemma2", "gpt_oss", "nemotron_h", "qwen3_5_text")
RUN = {
    family for family, traits in architectures.FAMILIES.items() if traits.causal and not traits.code_elsewhere
}


def test_every_supported_family_is_tested() -> None:
    assert families.FAMILIES.keys() == RUN


def logits(network: Any, tokens: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits_found: torch.Tensor = network(input_ids=tokens, use_cache=False, **inputs).logits
    return logits_found


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_shape_and_the_blocks_of_every_family_are_recognized(family: str) -> None:
    network = families.network(family)
    spec = hf_config.to_spec(network.config.to_dict(), "mine")
    assert spec.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert spec.layers == network.config.num_hidden_layers == len(blocks(network))
    kinds = getattr(network.config, "layer_types", None)
    assert kinds is None or spec.sliding_layers == sum(
        kind in ("sliding_attention", "chunked_attention") for kind in kinds
    )
    assert not any(hasattr(block, "experts") for block in blocks(network))
    fused = [name for name, _ in network.named_parameters() if ".experts." in name]
    inside = [
        name
        for name, module in network.named_modules()
        if type(module) in expert_blocks(network) and any(one.startswith(name) for one in fused)
    ]
    assert bool(inside) == bool(fused)


@pytest.mark.parametrize("family", families.FAMILIES)
def test_packing_is_refused_only_for_families_whose_documents_attend_to_each_other(family: str) -> None:
    """Two documents in one row, longer than windows and chunks, are compared with each alone."""
    network = families.network(family)
    tokens = torch.randint(3, 250, (1, 70), generator=torch.Generator().manual_seed(1))
    border = 40
    positions = torch.cat([torch.arange(border), torch.arange(70 - border)])[None]
    alone = torch.cat([logits(network, tokens[:, :border]), logits(network, tokens[:, border:])], dim=1)
    takes_positions = "position_ids" in inspect.signature(network.forward).parameters
    together = logits(network, tokens, **({"position_ids": positions} if takes_positions else {}))
    apart = (together - alone).abs().max() < 3 * SAME
    refused = bool(architectures.FAMILIES[family].packing_leak)
    assert apart or refused
    if family != "falcon":  # whose mask has the positions since a release after transformers 5.19
        assert apart != refused
    as_one = logits(network, tokens)
    assert (as_one - alone).abs().max() > 1e-2, "what comes before does change these logits"


def test_packing_is_refused_for_an_untested_family() -> None:
    assert architectures.family_of("helium").packing_leak


def test_blocks_are_recognized_by_their_number_if_a_family_does_not_name_them() -> None:
    network = families.network("llama")
    named = blocks(network)
    network._no_split_modules = None
    assert blocks(network) == named
    network.config.num_hidden_layers = 7
    assert blocks(network) == []


def test_scores_that_a_model_caps_are_capped(tmp_path: Path) -> None:
    """The attention of torch, which transformers selects by default, has no cap."""
    families.network("gemma2").save_pretrained(tmp_path)
    tokens = torch.arange(3, 60)[None]
    capped = causal.load(tmp_path, dtype=torch.float32).eval()
    assert capped.config._attn_implementation == "eager"
    free = causal.configuration(tmp_path)
    free.attn_logit_softcapping = None
    uncapped = type(capped).from_pretrained(tmp_path, config=free).eval()
    assert (logits(capped, tokens) - logits(uncapped, tokens)).abs().max() > 1e-2


# ---------------------------------------------------------------------------------------------------------
# Whole runs


Proofs = dict[tuple[str, str], Proof]  # by family and method


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Proofs]:
    """All runs with one sharding of the families, finished."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def of(sharding: str, different: bool) -> Proofs:
        chosen = tuple(family for family in families.FAMILIES if (family in DIFFERENT) == different)
        proofs = families.prove(folder / str(different) / sharding, sharding, chosen)
        return {(proof.family, proof.method): proof for proof in proofs}

    return lambda sharding, family: of(sharding, family in DIFFERENT)


@pytest.mark.slow
@pytest.mark.timeout(2 * families.GANG_LIMIT_S)  # the first test of a sharding waits for its runs
@pytest.mark.parametrize("method", families.METHODS)
@pytest.mark.parametrize(
    ("sharding", "family"),
    [
        pytest.param(sharding, each, marks=[] if each in DIFFERENT else [pytest.mark.nightly])
        for sharding in families.RESUMED
        for each in families.FAMILIES
    ]
    + [pytest.param("zero3", each, marks=pytest.mark.nightly) for each in DIFFERENT],
)
def test_a_family_trains_equally_with_every_sharding_resumes_exactly_and_exports_its_weights(
    tmp_path: Path, family: str, method: str, sharding: str, proved: Callable[[str, str], Proofs]
) -> None:
    proof = proved(sharding, family)[family, method]
    resumed = proved(families.RESUMED[0], family)[family, method]
    assert families.problems(proof, resumed, tmp_path) == []
    assert proof.losses[-1] < proof.losses[0] - 0.3


@pytest.mark.slow
def test_families_that_are_not_listed_as_supported_train(tmp_path: Path) -> None:
    runs = families.prove(tmp_path / "fsdp2", "fsdp2", tuple(families.UNTRIED), ("full",))
    for number, proof in enumerate(runs):
        assert families.problems(proof, proof, tmp_path / f"out-{number}") == [], proof.family
