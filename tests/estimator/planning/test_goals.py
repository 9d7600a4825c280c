"""Goals: what comes first with a deadline, a budget or limits, and what is said where nothing will do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from estimator import CannotFit, Job, Machine, Target, UserError, hardware
from estimator.formatting import format_duration
from estimator.models import find
from estimator.planning.candidates import TIE_MARGIN
from estimator.planning.goals import Goals
from estimator.planning.planner import plan, plans
from estimator.suggestions import format_suggestion

ANY = Target(kind="catalogue")
LORA = Job(model=find("llama-8b"), method="lora", global_batch_size=64)
BILLION = 10**9


def usd(made: Any) -> float:
    assert made.prediction.usd is not None
    return float(made.prediction.usd)


def hours(made: Any) -> float:
    assert made.prediction.hours is not None
    return float(made.prediction.hours)


def in_bands(values: list[float]) -> bool:
    """Whether each value is less than a fifth above all that come after it."""
    return all(value <= (1 + TIE_MARGIN) * min(values[i:]) for i, value in enumerate(values))


def test_a_deadline_selects_the_cheapest_plan_that_meets_it() -> None:
    anywhere = replace(ANY, capacity="any")
    free = plans(LORA, anywhere, Goals(tokens=BILLION)).best
    limit = hours(free) / 2
    ranked = plans(LORA, anywhere, Goals(tokens=BILLION, deadline_hours=limit))
    assert all(hours(made) <= limit for made in ranked.plans)
    assert in_bands([usd(made) for made in ranked.plans])
    assert (1 + TIE_MARGIN) * usd(ranked.best) >= usd(free)
    late = [line for line in ranked.rejected if line.kind == "deadline"]
    assert late
    assert all(f" of {format_duration(limit * 3600)}: " in line.reason for line in late)


def test_a_budget_selects_the_fastest_plan_within_it() -> None:
    cheapest = min(usd(made) for made in plans(LORA, ANY, Goals(tokens=BILLION), top=20).plans)
    ranked = plans(LORA, ANY, Goals(tokens=BILLION, budget_usd=1.5 * cheapest))
    assert all(usd(made) <= 1.5 * cheapest for made in ranked.plans)
    assert in_bands([hours(made) for made in ranked.plans])
    richer = plans(LORA, ANY, Goals(tokens=BILLION, budget_usd=15 * cheapest)).best
    assert hours(richer) <= hours(ranked.best)


@pytest.mark.parametrize(
    ("goals", "words", "option"),
    [
        (Goals(tokens=BILLION, budget_usd=1), "the cheapest is $", "--budget-usd"),
        (Goals(tokens=BILLION, deadline_hours=0.2), "the fastest takes", "--deadline-hours"),
        (Goals(tokens=BILLION, deadline_hours=1.5, budget_usd=1), "within 1.5 h for $1.00", "--budget-usd"),
    ],
)
def test_unmet_goals_name_the_nearest_plan_and_a_working_option(
    goals: Goals, words: str, option: str
) -> None:
    with pytest.raises(CannotFit) as caught:
        plans(LORA, ANY, goals)
    assert words in caught.value.problem
    name, value = format_suggestion(caught.value.suggestions[0]).split()
    assert name == option
    assert caught.value.example_plan is not None
    if option == "--budget-usd":
        assert f"in {format_duration(hours(caught.value.example_plan) * 3600)} on" in caught.value.problem
    looser = replace(goals, **{name.strip("-").replace("-", "_"): float(value)})
    assert plans(LORA, ANY, looser).plans


def test_a_deadline_within_the_start_up_of_all_machines_names_the_start_up_and_a_possible_deadline() -> None:
    goals = Goals(tokens=BILLION, deadline_hours=0.001)
    with pytest.raises(UserError) as caught:
        plans(LORA, ANY, goals)
    starts = [made.prediction.start_up for made in plans(LORA, ANY, Goals(prefer="speed")).plans]
    shortest = format_duration(min(start.hours for start in starts if start is not None) * 3600)
    problem = f"--deadline-hours 0.001 is shorter than the start-up of every machine: {shortest} ("
    assert caught.value.problem.startswith(problem)
    value = caught.value.advice.split("--deadline-hours ")[1].split(",")[0]
    assert plans(LORA, ANY, replace(goals, deadline_hours=float(value))).plans


def test_a_deadline_without_an_amount_of_training_is_refused() -> None:
    for goals in (Goals(deadline_hours=3), Goals(budget_usd=3)):
        with pytest.raises(UserError, match="--tokens"):
            plans(LORA, ANY, goals)


def test_equal_amounts_in_epochs_steps_and_tokens_cost_the_same() -> None:
    steps = BILLION // LORA.tokens_per_step
    amount = steps * LORA.tokens_per_step
    reported = (
        plan(LORA, ANY, Goals(tokens=amount)),
        plan(LORA, ANY, Goals(dataset_tokens=amount // 2, epochs=2)),
        plan(replace(LORA, steps=steps), ANY),
    )
    assert len({usd(made) for made in reported}) == 1


def test_clouds_and_machine_types_limit_the_plans() -> None:
    clouds = plans(LORA, ANY, Goals(clouds=("gcp", "azure")), top=20)
    assert {made.request.cloud for made in clouds.plans} <= {"gcp", "azure"}
    names = ("p4d.24xlarge", "g6e.12xlarge")
    types = plans(LORA, ANY, Goals(instance_types=names), top=20)
    assert {made.request.instance_type for made in types.plans} == set(names)


def test_more_than_16_nodes_are_searched_if_allowed() -> None:
    job = replace(LORA, global_batch_size=1024)
    target = Target(kind="catalogue", gpu="A100 SXM 40GB")
    wide = plan(job, target, Goals(prefer="speed", max_nodes=64, clouds=("aws",)))
    assert wide.layout.nodes > 16


def test_spot_plans_use_the_spot_price_and_unknown_stays_unknown() -> None:
    ranked = plans(LORA, ANY, Goals(spot=True), top=20)
    for made in ranked.plans:
        item = hardware.instance(made.request.instance_type or "")
        price = item.spot_usd_per_hour
        expected = None if price is None else pytest.approx(price * made.layout.nodes)
        assert (made.prediction.usd_per_hour, made.prediction.price_kind) == (expected, "spot")
    assert ranked.best.prediction.usd_per_hour is not None
    assert any("spot price is unknown" in line.reason for line in ranked.rejected)


# Methods


def test_method_auto_is_full_training_if_it_fits() -> None:
    chosen = plan(replace(LORA, method="auto"), ANY)
    assert chosen.method == "full"
    assert chosen.why[0].startswith("method full: the first of full, lora, qlora")


@pytest.mark.parametrize(
    ("model", "gpu", "method"), [("llama-8b", "L40S", "lora"), ("codestral", "L4", "qlora")]
)
def test_method_auto_on_one_gpu_is_the_first_that_fits_with_the_excess_of_others(
    model: str, gpu: str, method: str
) -> None:
    job = replace(LORA, model=find(model), method="auto")
    ranked = plans(job, Target(kind="catalogue", gpu=gpu, nodes=1, gpus=1))
    assert {made.method for made in ranked.plans} == {method}
    assert ranked.rejected[0].what.startswith(f"full on 1x {gpu}")
    assert ranked.rejected[0].reason.endswith("% over")
    assert ranked.rejected[0].reason in ranked.best.why[0]


def test_a_budget_too_small_for_full_training_selects_adapters() -> None:
    open_method = replace(LORA, method="auto")
    full, lora = (
        min(map(usd, plans(replace(LORA, method=method), ANY, Goals(tokens=BILLION)).plans))
        for method in ("full", "lora")
    )
    assert lora < full
    budget = (lora + full) / 2
    assert plan(open_method, ANY, Goals(tokens=BILLION, budget_usd=budget)).method == "lora"


def test_experts_are_offered_qlora_if_their_family_can_be_quantized() -> None:
    mixtral = replace(LORA, model=find("mixtral-8x7b"), method="auto", engine="fsdp2")
    one_gpu = Target(kind="catalogue", gpu="A100 SXM 80GB", nodes=1, gpus=1)
    assert plans(mixtral, one_gpu).best.method == "qlora"
    with pytest.raises(CannotFit) as caught:
        plans(replace(mixtral, model=find("llama-4-scout")), one_gpu)
    assert "(lora" in caught.value.problem


@pytest.mark.parametrize(
    ("gpu", "fields", "suggestion", "change"),
    [
        (
            "4x L4",
            {"model": find("llama-3.2-3b"), "task": "grpo", "method": "full"},
            {"optimizer.name": "adafactor", "precision": "bf16"},
            {"optimizer": "adafactor", "precision": "bf16"},
        ),
        ("L4", {"precision": "fp32"}, {"precision": None}, {"precision": "auto"}),
        ("L4", {"micro_batch_size": 16}, {"micro_batch_size": None}, {"micro_batch_size": None}),
        (
            "8x H100 SXM",
            {"method": "full", "liger": None, "seq_len": 65536, "recompute": "selective"},
            {"recompute.what": None},
            {"recompute": None},
        ),
        ("L4", {"trained_modules": ("lm_head",)}, {"lora.modules_to_save": None}, {"trained_modules": ()}),
        ("A100 SXM 40GB", {"lora_rank": 2000}, {"lora.rank": 1024}, {"lora_rank": 1024}),
        (
            "A100 SXM 80GB",
            {"method": "full", "engine": "fsdp2", "precision": "bf16-mixed"},
            {"precision": "bf16"},
            {"precision": "bf16"},
        ),
    ],
)
def test_the_error_suggests_changing_the_option_that_prevents_a_fit(
    gpu: str, fields: dict[str, Any], suggestion: dict[str, Any], change: dict[str, Any]
) -> None:
    count, _, name = gpu.rpartition("x ")
    usual = {"model": find("llama-8b"), "engine": "auto", "method": "lora", "global_batch_size": 16}
    job = Job(**(usual | fields))
    target = Target(kind="catalogue", gpu=name, nodes=1, gpus=int(count or 1))
    with pytest.raises(CannotFit) as caught:
        plans(job, target)
    assert suggestion in caught.value.suggestions
    assert plans(replace(job, **change), target).plans


@pytest.mark.parametrize(("liger", "suggested"), [(None, {}), (False, {"liger": True})])
def test_a_long_context_that_does_not_fit_gets_offload_suggested_and_liger_unless_it_is_on(
    liger: bool | None, suggested: dict[str, bool]
) -> None:
    job = Job(
        model=find("llama-8b"),
        engine="fsdp2",
        precision="bf16-mixed",
        seq_len=131_072,
        global_batch_size=8,
        liger=liger,
    )
    target = Target(kind="catalogue", gpu="H100 SXM", nodes=1, gpus=2)
    with pytest.raises(CannotFit) as caught:
        plans(job, target)
    leaner = [each for each in caught.value.suggestions if "fsdp.offload" in each]
    assert leaner == [{"fsdp.offload": "cpu"} | suggested]
    assert plans(replace(job, offload="cpu", liger=suggested.get("liger")), target).plans


def test_if_no_single_change_suffices_a_combination_is_suggested() -> None:
    target = Target(kind="catalogue", gpu="L4", nodes=1, gpus=1)
    for seq_len, liger in ((16384, " --liger"), (4096, "")):
        job = replace(LORA, seq_len=seq_len, micro_batch_size=4, activation_checkpointing=False)
        with pytest.raises(CannotFit) as caught:
            plans(job, target)
        offered = [format_suggestion(suggestion) for suggestion in caught.value.suggestions]
        [together] = [words for words in offered if words.endswith(", without --micro-batch-size")]
        assert together.startswith(f"--activation-checkpointing{liger}")


# The order itself


def test_top_returns_the_first_plans_of_the_same_ranking() -> None:
    ranked = plans(LORA, ANY, top=8)
    assert plans(LORA, ANY, top=3).plans == ranked.plans[:3]
    assert in_bands(
        [
            made.prediction.usd_per_hour / made.prediction.tokens_per_second
            for made in ranked.plans
            if made.prediction.usd_per_hour and made.prediction.tokens_per_second
        ]
    )


def test_a_catalogue_argument_replaces_the_shipped_one() -> None:
    tables = hardware.current()
    mine = replace(
        hardware.instance("p4d.24xlarge"), cloud="basement", name="my-box", usd_per_hour=0.01, region=None
    )
    own = hardware.Catalogue(gpus=tables.gpus, instances=(*tables.instances, mine))
    chosen = plan(LORA, ANY, catalogue=own)
    assert (chosen.request.instance_type, chosen.request.cloud) == ("my-box", "basement")
    assert plan(LORA, ANY).request.instance_type != "my-box"


def test_a_preference_pair_is_two_sequences() -> None:
    rows = replace(LORA, steps=100, activation_checkpointing=True)
    made, plain = plan(replace(rows, task="dpo"), ANY), plan(rows, ANY)
    assert made.prediction.tokens == 2 * (plain.prediction.tokens or 0)
    assert made.layout.micro_batch_size < plain.layout.micro_batch_size


def test_time_and_price_of_a_task_are_compared_with_sft() -> None:
    one_kind = replace(ANY, gpu="A100 SXM 80GB")
    lines = {
        task: next(
            line for line in plan(replace(LORA, engine="deepspeed", task=task), one_kind).why if "sft" in line
        )
        for task in ("dpo", "kto", "orpo", "reward")
    }
    times = {task: float(line.split(": ")[1].split()[0]) for task, line in lines.items()}
    assert times["dpo"] > times["orpo"] > 1.3
    assert times["reward"] > 1.3
    assert times["kto"] > 1.5
    assert "two answers a row, and the reference's forward pass" in lines["dpo"]
    assert not any("times the time" in line for line in plan(LORA, ANY).why)


def test_a_deadline_applies_to_a_local_machine() -> None:
    card = hardware.gpu("L40S")
    machine = Machine(
        gpus=((card.name, card.vram_bytes),), cpu_cores=16, ram_bytes=128 * 2**30, disk_free_bytes=2**40
    )
    here = Target(machine=machine)
    chosen = plan(LORA, here, Goals(tokens=10**6, deadline_hours=100))
    assert hours(chosen) < 100
    with pytest.raises(CannotFit, match="on this machine"):
        plan(LORA, here, Goals(tokens=10**9, deadline_hours=1))
