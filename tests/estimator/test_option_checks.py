"""Messages about values of options name the option as users type it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from estimator import Job, Target, UserError, hardware, models, plan, render
from estimator.cli.app import app
from estimator.option_checks import check_above_zero, check_choice, check_count
from estimator.planning.goals import Goals
from estimator.setup import Setup
from tests.estimator.models.hf_configs import config_of

COUNTS = {
    "plan": (
        "micro-batch-size global-batch-size seq-len lora-rank gpus nodes max-gpus max-nodes top tp cp pp ep "
        "epochs fsdp-replicas recompute-every deadline-hours budget-usd tokens dataset-tokens"
    ),
    "estimate": (
        "micro-batch-size seq-len lora-rank gpus nodes tp cp pp ep virtual-stages shard dp-replicate "
        "accumulation recompute-every tokens document-tokens loss-chunks flash-version network-gbps"
    ),
}
CASES = [(command, f"--{name}") for command, names in COUNTS.items() for name in names.split()]


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize(("command", "option"), CASES)
def test_a_number_that_is_too_small_is_named_with_its_option_and_a_remedy(
    command: str, option: str, value: str
) -> None:
    where = ["--no-here"] if command == "plan" else ["--gpu", "H100 SXM"]
    done = CliRunner().invoke(app, [command, "--model", "llama-8b", *where, option, value])
    problem, advice = done.stderr.splitlines()
    assert problem.startswith(f"{option} {value} ")
    assert advice
    assert done.exit_code == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("plan --fsdp-sharding half", "--fsdp-sharding half is not known."),
        ("plan --engine fsdp2 --fsdp-offload disk", "--fsdp-offload disk is not known."),
        ("plan --zero-offload disk", "--zero-offload disk is not known."),
        ("plan --recompute-what some", "--recompute-what some is not known."),
        ("plan --prefer both", "--prefer both is not known."),
        ("estimate --recompute-what some", "--recompute-what some is not known."),
        ("estimate --sharding half", "--sharding half is not known."),
        ("estimate --keep-checkpoints -1", "--keep-checkpoints -1 must be a whole number from 0."),
    ],
)
def test_an_unknown_choice_is_named_with_its_option(words: str, problem: str) -> None:
    command, *options = words.split()
    done = CliRunner().invoke(app, [command, "--model", "llama-8b", *options])
    assert done.stderr.splitlines()[0] == problem
    assert done.exit_code == 2


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None])
def test_a_count_is_a_whole_number_above_0(value: object) -> None:
    with pytest.raises(UserError, match=r"--lora-rank .* must be a whole number above 0"):
        check_count("lora.rank", value)


@pytest.mark.parametrize("value", [0, -1.5, float("nan"), float("inf"), "3", None, True])
def test_an_amount_is_a_finite_number_above_0(value: object) -> None:
    with pytest.raises(UserError, match=r"--budget-usd .* must be a number above 0"):
        check_above_zero("budget_usd", value, "USD")


def test_values_from_python_are_checked_like_options() -> None:
    check_choice("optimizer.name", "adamw", ("adamw", "sgd"))
    model = models.find("llama-8b")
    for build in (
        lambda: Job(model=model, seq_len="2048"),  # type: ignore[arg-type]
        lambda: Setup(model=model, seq_len=2048.0),  # type: ignore[arg-type]
        lambda: Goals(budget_usd="5"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UserError, match=r"--(seq-len|budget-usd) "):
            build()


LLAMA = models.find("llama-8b")
CATALOGUE = Target(kind="catalogue")
WRONG_TYPES: dict[str, tuple[Callable[[], object], str]] = {
    "a kind as target": (
        lambda: plan(Job(model=LLAMA), "kubernetes"),
        "target = 'kubernetes' is a str, not a Target",
    ),
    "no target": (lambda: plan(Job(model=LLAMA), None), "target is None, not a Target"),
    "a name as job": (lambda: plan("llama-8b", CATALOGUE), "job = 'llama-8b' is a str, not a Job"),
    "swapped": (lambda: plan(CATALOGUE, Job(model=LLAMA)), "job is a Target, not a Job"),
    "goals as dict": (lambda: plan(Job(model=LLAMA), CATALOGUE, {"tokens": 1}), "is a dict, not a Goals"),
    "a number as bandwidth": (
        lambda: plan(Job(model=LLAMA), CATALOGUE, bandwidth=300),
        "is an int, not a Measured",
    ),
    "a file as catalogue": (lambda: plan(Job(model=LLAMA), CATALOGUE, catalogue="my.csv"), "not a Catalogue"),
    "a ranking as plan": (lambda: render([]), "plan = [] is a list, not a Plan"),
    "no model to resolve": (lambda: models.resolve(None), "model is None, not a str"),
    "no model to find": (lambda: models.find(None), "model is None, not a str"),
    "an empty model name": (lambda: models.resolve(" "), "The name of the model is empty"),
    "a reference as model": (
        lambda: Job(model=models.resolve("llama-8b")),
        "model is a ModelRef, not a ModelSpec",
    ),
    "text as flag": (lambda: Job(model=LLAMA, packing="yes"), "packing = 'yes' is a str, not a bool"),
    "text as names": (lambda: Job(model=LLAMA, lora_targets="q_proj"), "lora_targets = 'q_proj' is a str"),
    "text as clouds": (lambda: Goals(clouds="aws"), "clouds = 'aws' is a str, not a tuple or list"),
    "a name as machine": (lambda: Target(machine="H100"), "machine = 'H100' is a str, not a Machine"),
    "a GPU as name": (lambda: Target(kind="catalogue", gpu=hardware.gpu("L4")), "gpu is a Gpu, not a str"),
    "no GPU": (lambda: hardware.gpu(None), "GPU is None, not a str"),
    "no instance type": (lambda: hardware.instance(5), "instance type = 5 is an int, not a str"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_a_value_of_another_type_from_python_is_refused_with_a_remedy(case: str) -> None:
    call, problem = WRONG_TYPES[case]
    with pytest.raises(UserError) as caught:
        call()
    assert problem in caught.value.problem
    assert caught.value.advice


def test_the_path_of_a_model_folder_may_be_a_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(LLAMA)))
    assert models.resolve(tmp_path).spec.parameters == LLAMA.parameters
