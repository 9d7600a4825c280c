"""Engines support their listed families and refuse other models in one clause.

The slow ones show that all train on the same rows, in the order that was written down.
"""

from pathlib import Path
from typing import Any

import pytest

from estimator import models
from estimator.models import hf_config
from estimator.vocabulary import LAUNCHED_ENGINES
from launchers.dataset import prepare
from launchers.dataset.prepared import Prepared
from launchers.dataset.rows import Conversation
from launchers.models import tiny_llama
from launchers.run.job import unsupported
from launchers.settings import Settings, build
from tests.launchers.engines.loop import families, runs
from tests.launchers.engines.loop.families import reported

LOOP = models.FAMILIES.keys() - {"bert", "qwen"}  # an encoder, and code that is no part of transformers
RUN = {"torchtune": {"llama", "mistral", "qwen2"}, "deepspeed": LOOP, "fsdp2": LOOP}


RECURRENT = {name for name, traits in models.FAMILIES.items() if traits.recurrence}
LEAKS = {"deepseek_v4", "falcon", "llama4_text", "mpt", "helium"} | RECURRENT  # helium is untested


@pytest.mark.parametrize("engine", RUN)
def test_an_engine_supports_exactly_its_listed_families(engine: str) -> None:
    for spec in map(models.find, models.names()):
        if spec.family not in RUN[engine]:
            assert spec.name in (unsupported(engine, Settings(seq_len=256), spec) or "")
    for family in RUN[engine]:
        config = {"model_type": family} | families.FAMILIES[family]
        if engine == "torchtune":
            config |= {"sliding_window": None}
        spec = hf_config.to_spec(config, "mine")
        assert unsupported(engine, Settings(seq_len=64), spec) is None, family


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2"])
def test_the_loop_engine_refuses_models_and_packing_by_family(engine: str) -> None:
    reasons = {
        "qwen-7b": "is a qwen model, for which transformers has no code",
        "bert-base-cased": "an encoder",
        "mpt-pretrain-7b": "learned positions",
    }
    for name, because in reasons.items():
        assert because in (unsupported(engine, Settings(seq_len=256), models.find(name)) or "")
    for family in (*LOOP, "helium"):
        config = {"model_type": family} | (families.FAMILIES | families.UNTRIED)[family]
        reason = unsupported(engine, Settings(seq_len=64, packing=True), hf_config.to_spec(config, "mine"))
        assert (reason or "").startswith("packing: ") == (reason is not None) == (family in LEAKS), family


def small(family: str = "llama", **fields: Any) -> models.ModelSpec:
    config = {
        "model_type": family,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 2048,
        **fields,
    }
    return hf_config.to_spec(config, "mine")


@pytest.mark.parametrize(
    ("family", "field", "value", "named"),
    [
        ("llama", "attention_bias", True, "q, k and v"),
        ("llama", "mlp_bias", True, "the MLP"),
        ("llama", "hidden_act", "gelu", "hidden_act gelu"),
        ("qwen2", "hidden_act", "gelu_new", "hidden_act gelu_new"),
        ("llama", "attention_dropout", 0.1, "attention_dropout 0.1"),
    ],
)
def test_torchtune_refuses_a_config_field_that_it_would_ignore_by_name(
    family: str, field: str, value: object, named: str
) -> None:
    spec = small(family, **{field: value})
    reason = unsupported("torchtune", Settings(seq_len=256), spec)
    assert named in (reason or "")
    assert unsupported("deepspeed", Settings(seq_len=256), spec) is None


@pytest.mark.parametrize("engine", RUN)
def test_a_model_with_partial_rotary_embeddings_is_refused_and_harmless_fields_are_not(engine: str) -> None:
    partial = {"partial_rotary_factor": 0.5}
    for fields in (partial, {"rope_parameters": {"rope_type": "default", **partial}}):
        reason = unsupported(engine, Settings(seq_len=256), small(**fields))
        assert "partial_rotary_factor 0.5" in (reason or "")
    harmless = {"hidden_act": None, "attention_dropout": 0, "pretraining_tp": 2}
    for fields in ({}, {"hidden_act": "swish"}, harmless):
        assert unsupported(engine, Settings(seq_len=256), small(**fields)) is None


def test_only_fsdp2_trains_a_model_that_generates_images() -> None:
    spec, settings = models.find("stable-diffusion-xl"), Settings(task="text-to-image")
    assert unsupported("fsdp2", settings, spec) is None
    for engine in set(LAUNCHED_ENGINES) - {"fsdp2"}:
        assert "is trained by fsdp2" in (unsupported(engine, settings, spec) or "")


BATCH, STEPS, WORLD = 4, 4, 2
SHARDINGS = {"torchtune": "fsdp", "deepspeed": "zero2", "fsdp2": "fsdp"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("models") / "tiny")


def varied(folder: Path, model: Path, **settings: Any) -> Path:
    """Prepare rows of 4 to 55 words in the order of a run of two epochs."""
    texts = [Conversation(text=f"Row {n}: " + "la " * (n * 17 % 52)) for n in range(10)]
    prepared = build({"global_batch_size": BATCH, "epochs": 2, "max_steps": STEPS, **settings})
    prepare.prepare(texts, model, prepared, 60, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    ["fsdp2", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("torchtune", "deepspeed"))],
)
def test_a_run_that_starts_with_the_longest_rows_resumes_bit_by_bit(
    engine: str, tmp_path: Path, model: Path
) -> None:
    data = varied(tmp_path / "data", model)
    lengths = Prepared(data).row_lengths[Prepared(data).order]
    assert lengths[:BATCH].tolist() == sorted(Prepared(data).row_lengths, reverse=True)[:BATCH]
    job = runs.make_job(
        tmp_path / "whole",
        model,
        data,
        steps=STEPS,
        world=WORLD,
        micro=1,
        accumulation=BATCH // WORLD,
        engine=engine,
        sharding=SHARDINGS[engine],
        settings={"optimizer": {"lr": 3e-3}},
        checkpoint_every=2,
    )
    full_run = runs.run(job)
    for rank in range(WORLD):
        # the rows of each step and rank, told apart by their lengths
        tokens = [step.tokens for step in runs.steps(job, rank)]
        assert tokens == [lengths[at : at + BATCH][rank::WORLD].sum() for at in range(0, len(lengths), BATCH)]
    resumed_steps = runs.run(runs.resumed(job, tmp_path / "rest", 2))
    assert [reported(step) for step in resumed_steps] == [reported(step) for step in full_run[2:]]
