"""Messages about values of options name the option as users type it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from estimator import Job, UserError, models
from estimator.cli.app import app
from estimator.option_checks import check_above_zero, check_choice, check_count
from estimator.planning.goals import Goals
from estimator.setup import Setup

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
