"""A run from settings to plan, for all entry points: automatic settings and refusals."""

from __future__ import annotations

import dataclasses
import json
import pickle
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from estimator import Target, hardware, models
from estimator.cli.plan import job_from
from estimator.cli.plan_options import JobOptions
from estimator.engines.support import planned_only, with_simplest_engine
from estimator.errors import UserError
from estimator.job import Job, Machine
from estimator.models import find
from estimator.plan import GIB
from estimator.setup import DEFAULT_SEQ_LEN, TINY_SEQ_LEN
from estimator.vocabulary import AUTOMATIC_METHODS, LAUNCHED_ENGINES, LAUNCHED_METHODS, TASKS
from launchers import run_config, settings
from launchers.engines.deepspeed import engine as deepspeed
from launchers.run import checks, preparation
from launchers.run.job import build_job, unsupported
from launchers.settings.sections import DEFAULT_ANSWERS, Evaluation
from tests.lab.configs import config

MACHINE = Machine(cpu_cores=4, ram_bytes=16 * GIB, disk_free_bytes=100 * GIB)
TINY = find("tiny-llama")
HERE = Target(kind="local", machine=MACHINE)


def test_automatic_settings_are_decided_from_model_and_method() -> None:
    lora = config({"method": "lora"}, "llama-8b").with_checkpoint_interval(200)
    assert (lora.optimizer.lr, lora.seq_len, lora.checkpoint_every) == (2e-4, DEFAULT_SEQ_LEN, 20)
    for method in ("adapter-v1", "adapter-v2"):
        assert config({"method": method}, "llama-8b").optimizer.lr == 1e-3, "litgpt's; gates begin at 0"
        job = build_job(settings.build({"method": method}), find("llama-8b"), None)
        assert with_simplest_engine(job).engine == "deepspeed"
    values = {
        "method": "full",
        "engine": "torchtune",
        "checkpoint_every": 7,
        "optimizer": {"lr": 1.0},
        "seq_len": 64,
        "dataset": "org/name",
        "global_batch_size": 8,
        "packing": True,
        "liger": False,
        "compile": True,
    }
    decided = config(values, "llama-8b").with_checkpoint_interval(200)
    assert decided.automatic_choices == ()
    assert decided.model_dump(exclude={"automatic_choices"}) == settings.build(values).model_dump()


def test_packing_liger_and_compile_are_decided_by_the_plan_unless_set() -> None:
    values = {
        "model": "llama-8b",
        "method": "lora",
        "engine": "fsdp2",
        "resources": {"gpu": "H100", "gpus": 1},
    }
    cloud = Target(kind="kubernetes")

    def decided(**overrides: object) -> tuple[bool, bool, bool, int]:
        chosen = preparation.plan_run(settings.build(values | overrides), cloud).settings
        return chosen.packing, chosen.liger, chosen.compile, chosen.min_packed_steps

    assert decided() == (True, True, True, run_config.MIN_PACKED_STEPS)
    assert decided(packing=True) == (True, True, True, 0)
    assert decided(liger=False, compile=False)[1:3] == (False, False)
    assert decided(global_batch_size=32)[0] is False, "it counts rows"
    assert decided(group_by_length=True)[0] is False
    assert preparation.plan_run(settings.build({}), HERE).settings.packing is False


def test_liger_and_compile_are_off_if_not_installed_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("launchers.run.job.shutil.which", lambda _: None)
    monkeypatch.setattr("launchers.run.job.importlib.util.find_spec", lambda _: None)
    spec, auto = find("llama-8b"), settings.build({})
    installed_job, elsewhere = (
        build_job(auto, spec, None, installed=installed) for installed in (True, False)
    )
    assert (installed_job.liger, installed_job.compile) == (False, False)
    assert (elsewhere.liger, elsewhere.compile) == (None, None)
    configured = build_job(settings.build({"liger": True, "compile": True}), spec, None, installed=True)
    assert (configured.liger, configured.compile) == (True, True)


def test_support_tickets_are_evaluated_on_their_test_split_and_other_data_as_configured() -> None:
    def evaluation(**values: object) -> Evaluation:
        return config(values).evaluation

    assert (evaluation().dataset, evaluation().answers) == ("support-tickets#test", 150)
    assert evaluation(task="dpo").dataset == "support-tickets#test"
    assert evaluation(task="dpo").answers == DEFAULT_ANSWERS
    assert evaluation(dataset="python-docs") == Evaluation()
    assert evaluation(dataset="python-docs").answers == DEFAULT_ANSWERS
    assert evaluation(mixture={"python-docs": 1}) == Evaluation()
    assert evaluation(evaluation={"fraction": 0.2}).dataset is None
    assert evaluation(evaluation={"dataset": "mine.jsonl", "generations": 2}).dataset == "mine.jsonl"
    assert evaluation(evaluation={"dataset": "mine.jsonl", "generations": 2}).answers == 2


@pytest.mark.parametrize("task", ["sft", "pretrain", "dpo", "kto"])
def test_both_splits_of_the_default_dataset_are_rows_of_the_task(tmp_path: Path, task: str) -> None:
    chosen = config({"task": task})
    train, held_out = preparation.read_data(chosen, tmp_path)
    assert len(train) > 10 * len(held_out) > 1000
    assert type(train[0]) is type(held_out[0])
    assert task != "pretrain" or all(row.text for row in train)  # type: ignore[union-attr]


@pytest.mark.parametrize("method", LAUNCHED_METHODS)
def test_plan_and_run_agree_on_which_models_tasks_and_engines_can_be_launched(method: str) -> None:
    specs = {spec.family: (spec.name, spec) for spec in map(find, models.names())}.values()
    able = 0
    for task, engine in product(TASKS, (*LAUNCHED_ENGINES, "auto")):
        chosen = settings.build({"method": method, "seq_len": 512, "task": task, "engine": engine})
        options = JobOptions(model=TINY.name, method=method, task=task, engine=engine, seq_len=256)
        of_options = None if TASKS[task].images else job_from(options)  # plan refuses images of other models
        names = LAUNCHED_ENGINES if engine == "auto" else (engine,)
        for name, spec in specs:
            refused = all(unsupported(each, chosen, spec) for each in names)
            jobs = [build_job(chosen, spec, None)]
            if of_options is not None:
                targets = tuple(spec.projections)
                jobs.append(dataclasses.replace(of_options, model=spec, lora_targets=targets))
            for job in jobs:
                only = planned_only(with_simplest_engine(job))
                assert (only is not None) == refused, (name, task, engine, only)
            able += not refused
    assert able > 10


def test_the_default_lora_targets_use_the_layer_names_of_the_model_family() -> None:
    chosen = settings.build({"method": "lora", "seq_len": 512})
    assert build_job(chosen, find("llama-8b"), None).lora_targets == models.PROJECTIONS
    assert "gate_proj" not in build_job(chosen, find("phi-2"), None).lora_targets
    latent = build_job(chosen, find("deepseek-v2-lite"), None).lora_targets
    assert set(models.LATENT_PROJECTIONS) & set(latent)
    named = settings.build({"method": "lora", "seq_len": 512, "lora": {"targets": ["gate_proj"]}})
    with pytest.raises(UserError, match="not a linear layer of phi-2"):
        build_job(named, find("phi-2"), None)


def test_new_tokens_add_the_embeddings_to_the_trained_modules() -> None:
    expected_settings = settings.build(
        {"method": "lora", "new_tokens": ["<a>", "<b>"], "lora": {"modules_to_save": ["norms"]}}
    )
    spec = find("llama-8b")
    job = build_job(expected_settings, spec, None)
    assert with_simplest_engine(job).engine == "deepspeed"
    assert (job.model.vocab, job.model.parameters) == (spec.vocab + 2, spec.parameters + 2 * 2 * spec.hidden)
    assert job.trained_modules == ("norms", "embed_tokens", "lm_head")
    assert "new_tokens" in (unsupported("torchtune", expected_settings, spec) or "")
    adapter = settings.build({"method": "adapter-v1", "new_tokens": ["<a>"]})
    assert "trains neither" in (unsupported("fsdp2", adapter, spec) or "")
    assert "is gemma" in (unsupported("fsdp2", expected_settings, find("gemma-7b")) or "")


def test_an_automatic_method_is_decided_by_the_plan_together_with_engine_and_learning_rate() -> None:
    large = {"model": "llama-70b", "method": "auto", "resources": {"gpu": "A100 SXM 80GB", "nodes": 1}}
    run = preparation.plan_run(settings.build(large), Target(kind="kubernetes"))
    assert run.plan.method in ("lora", "qlora")
    assert (run.settings.method, run.settings.engine) == (run.plan.method, run.plan.engine)
    assert run.settings.optimizer.lr == 2e-4
    assert preparation.check_matches(run.plan, settings.build(large), find("llama-70b")) == run.plan


@pytest.mark.parametrize(
    ("values", "methods"),
    [
        ({"lora": {"rank": 8}}, ("lora", "qlora")),
        ({"lora": {"alpha": 32}}, ("lora", "qlora")),
        ({"export": {"adapter_only": True}}, ("lora", "qlora")),
        ({"lora": {"quantization": "int8"}}, ("qlora",)),
        ({}, AUTOMATIC_METHODS),
    ],
)
def test_an_automatic_method_supports_the_configured_options(
    values: dict[str, Any], methods: tuple[str, ...]
) -> None:
    text = json.dumps({"model": "tiny-llama", "method": "auto", **values})
    chosen = pickle.loads(pickle.dumps(settings.build(settings.parse_yaml(text))))  # noqa: S301
    run = preparation.plan_run(chosen, HERE)
    assert run.plan.method == methods[0]
    assert f"the first of {', '.join(methods)} that fits" in " ".join(run.plan.why)


def test_a_plan_with_tight_memory_is_used_only_if_accepted() -> None:
    name = hardware.gpu("A100 SXM 40GB").name
    resources = Machine(cpu_cores=16, ram_bytes=64 * GIB, disk_free_bytes=100 * GIB)
    verdicts = set()
    for size in range(24, 28):
        machine = dataclasses.replace(resources, gpus=((name, size * GIB),))
        target = Target(kind="local", machine=machine)
        for tight in (False, True):
            chosen = {"model": "llama-8b", "method": "lora", "resources": {"tight": tight}}
            run = preparation.plan_run(settings.build(chosen), target, calibrated=False)
            verdicts.add((tight, run.plan.prediction.memory.verdict))
    assert verdicts == {(False, "fits"), (True, "fits"), (True, "tight")}


@pytest.mark.parametrize("steps", [1, 5, 99, 1000])
def test_about_ten_checkpoints_are_written_but_not_one_at_every_step(steps: int) -> None:
    every = config().with_checkpoint_interval(steps).checkpoint_every
    assert every >= min(10, steps)
    assert steps // every <= 10


def test_a_run_is_planned_with_the_resolved_model_the_defaults_and_the_chosen_plan() -> None:
    planned_jobs: list[tuple[Job, Target]] = []

    def choose(job: Job, target: Target, corrections: object) -> object:
        planned_jobs.append((job, target))
        return preparation.best_plan(job, target, None)

    chosen = settings.build({"resources": {"nodes": 2, "device": "cpu"}})
    run = preparation.plan_run(chosen, HERE, choose=choose)  # type: ignore[arg-type]
    [(job, target)] = planned_jobs
    assert (job.engine, job.global_batch_size) == ("auto", chosen.batch_size)
    assert (target.gpus, target.nodes, target.machine) == (None, 2, MACHINE)
    assert (run.model.name, run.model.spec) == ("tiny-llama", find("tiny-llama"))
    assert (run.settings.seq_len, run.settings.optimizer.lr) == (TINY_SEQ_LEN, 7e-4)
    assert (run.plan.layout.nodes, run.plan.layout.device) == (2, "cpu")


def test_impossible_settings_are_refused_before_planning(tmp_path: Path, dataset: Path) -> None:
    (tmp_path / "empty").mkdir()
    for values, expected_text in (
        ({"engine": "deepspeed", "compile": True, "zero": {"stage": 3}}, "hooks of ZeRO-3"),
        ({"seq_len": 10**6}, "longer than the 2048 tokens"),
        ({"model": "no-such-model"}, "no-such-model"),
        ({"model": str(tmp_path / "empty")}, "config.json"),
        ({"evaluation": {"dataset": str(tmp_path / "gone.jsonl")}}, "There is no dataset"),
    ):
        chosen = settings.build({"dataset": str(dataset), **values})
        with pytest.raises(UserError) as refused:
            preparation.plan_run(chosen, HERE, choose=_never)  # type: ignore[arg-type]
        assert expected_text in f"{refused.value.problem} {refused.value.advice}"


def _never(*_: object) -> object:
    raise AssertionError("a plan was made where none may be")


def test_an_engine_with_missing_packages_is_refused_with_the_packages_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = dataclasses.replace(deepspeed.NEEDS, packages=("torch", "not_there"))
    monkeypatch.setattr(deepspeed, "NEEDS", needs)
    checks.check_installed("torchtune")
    with pytest.raises(UserError, match="not_there is not installed"):
        checks.check_installed("deepspeed")
    monkeypatch.setattr(preparation.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="liger-kernel is not installed"):
        checks.check_installed("fsdp2", liger=True)


def test_a_disk_that_is_too_small_is_named() -> None:
    plan = preparation.plan_run(settings.build({}), HERE).plan
    checks.check_disks(plan, [("/large", 10**15)])
    with pytest.raises(UserError, match=r"/small has 1\.00 GiB free") as refused:
        checks.check_disks(plan, [("/large", 10**15), ("/small", GIB)])
    assert "FINETUNE_WORK_DIR" in refused.value.advice


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"global_batch_size": 16}, "planned with --global-batch-size 8; the run requests 16"),
        ({"method": "full"}, "planned with --method lora; the run requests full"),
        ({"seq_len": 128}, "planned with --seq-len 256; the run requests 128"),
        ({"lora": {"rank": 64}}, "planned with --lora-rank 16; the run requests 64"),
        ({"lora": {}}, "planned with --lora-rank 16; the run requests the default"),
        ({"packing": True}, "planned with --packing False; the run requests True"),
        ({"precision": "bf16"}, "planned with --precision fp32; the run requests bf16"),
        ({"task": "dpo"}, "planned with the default --task; the run requests dpo"),
    ],
)
def test_a_deployment_started_for_another_job_is_refused(values: dict[str, Any], message: str) -> None:
    base = {"global_batch_size": 8, "method": "lora", "lora": {"rank": 16}}
    plan = preparation.plan_run(settings.build(base), HERE).plan
    spec = find("tiny-llama")
    for same in ({}, {"engine": plan.engine, "method": "auto"}, {"precision": "fp32", "max_steps": 7}):
        assert preparation.check_matches(plan, settings.build(base | same), spec) == plan
    with pytest.raises(UserError, match=message) as refused:
        preparation.check_matches(plan, settings.build(base | values), spec)
    assert "Redeploy the flow" in refused.value.advice
    with pytest.raises(UserError, match="no plan"):
        preparation.check_matches(None, settings.build({}), spec)


def counted(configured: settings.Settings) -> int | None:
    return preparation.count_steps(configured, TINY, preparation.count_rows(configured))


def test_the_users_number_of_steps_takes_precedence_over_one_epoch(dataset: Path) -> None:
    values = {"dataset": str(dataset), "evaluation": {"fraction": 0}}  # 60 rows: 3 steps of 16
    run = preparation.plan_run(settings.build({**values, "max_steps": 40}), HERE)
    assert run.plan.prediction.tokens == 40 * 16 * TINY_SEQ_LEN
    assert counted(run.settings) == 40
    assert counted(settings.build({**values, "max_steps": 40, "epochs": 1})) == 3


def test_a_default_batch_is_adjusted_to_the_number_of_processes(dataset: Path) -> None:
    values = {"dataset": str(dataset), "evaluation": {"fraction": 0}, "epochs": 2}
    run = preparation.plan_run(settings.build({**values, "resources": {"gpus": 5, "device": "cpu"}}), HERE)
    assert run.settings.global_batch_size == run.plan.layout.global_batch_size == 15
    assert any("nearest possible one to the default of 16" in line for line in run.plan.why)
    assert run.plan.prediction.tokens == 2 * 60 // 15 * 15 * TINY_SEQ_LEN, "in steps of that batch"
    with pytest.raises(UserError, match="batch of 16 is not divisible"):
        preparation.plan_run(
            settings.build({**values, "global_batch_size": 16, "resources": {"gpus": 5, "device": "cpu"}}),
            HERE,
        )


def test_requested_gpus_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UserError, match="has no NVIDIA GPU reported by a driver") as refused:
        preparation.plan_run(settings.build({"resources": {"gpus": 4}}), HERE)
    assert "--device cpu" in refused.value.advice
    run = preparation.plan_run(settings.build({"resources": {"gpus": 4, "device": "cpu"}}), HERE)
    assert run.plan.layout.world_size == 4


def test_a_default_batch_is_no_larger_than_the_dataset(tmp_path: Path) -> None:
    small_file = tmp_path / "few.jsonl"
    small_file.write_text('{"text": "plain"}\n' * 10)
    values = {"dataset": str(small_file), "evaluation": {"fraction": 0}}
    run = preparation.plan_run(settings.build(values), HERE)
    assert run.settings.global_batch_size == 10
    assert settings.build({"task": "grpo", "rl": {"group_size": 6}}).batch_size == 18


def test_the_number_of_steps_is_known_if_the_dataset_is_local(dataset: Path) -> None:
    values = {"dataset": str(dataset), "global_batch_size": 8, "evaluation": {"fraction": 0.1}}
    once = counted(settings.build(values))
    assert once == 54 // 8
    assert counted(settings.build({**values, "epochs": 3})) == 3 * 54 // 8
    assert counted(settings.build({**values, "epochs": 3, "max_steps": 5})) == 5
    assert counted(settings.build({"dataset": "owner/rows"})) is None


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        ({}, 1, "nothing is learned"),
        ({}, 5, "does not reach its peak"),
        ({"warmup_ratio": 1.0}, 40, "warm-up takes 40 steps, the run 40"),
        ({}, 6, None),
        ({"warmup_steps": 0}, 1, None),
    ],
)
def test_a_run_that_ends_in_its_warm_up_gets_a_warning(
    schedule: dict[str, float], steps: int, expected: str | None
) -> None:
    reported = preparation.short_run_warning(settings.build({"schedule": schedule}), steps)
    assert (reported is None) == (expected is None)
    assert expected is None or expected in (reported or "")


def test_steps_of_a_token_budget_are_planned_with_full_sequences() -> None:
    values = {"dataset": "owner/rows", "tokens": "20k", "global_batch_size": 16, "seq_len": 256}
    assert counted(settings.build(values)) == 5
    assert counted(settings.build({**values, "task": "orpo"})) == 3, "a pair is two sequences"
    assert counted(settings.build({**values, "tokens": 4096})) == 1


def test_all_local_datasets_of_a_mixture_are_checked_and_counted(dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "plain"}\n' * 10)
    values = {"dataset": str(dataset), "global_batch_size": 8, "evaluation": {"fraction": 0}}
    mixed = settings.build({**values, "mixture": {str(other): 2}})
    assert counted(mixed) == (60 + 20) // 8
    samples, _ = preparation.read_data(mixed, tmp_path / "data")
    assert [row.source for row in samples] == [0] * 60 + [1] * 10
    assert counted(settings.build({**values, "mixture": {"owner/rows": 1}})) is None
    held_out_settings = mixed.model_copy(update={"evaluation": Evaluation(dataset=str(other))})
    assert len(preparation.read_data(held_out_settings, tmp_path / "data")[1] or ()) == 10
    assert preparation.read_data(mixed, tmp_path / "data")[1] is None, "nothing of an earlier attempt"
    other.write_text("{broken")
    with pytest.raises(UserError, match=r"other\.jsonl, line 1"):
        counted(mixed)


def test_plain_text_is_accepted_for_pretraining_only(dataset: Path, tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text("Once upon a time.")
    chosen = settings.build({"task": "pretrain", "dataset": str(book)})
    assert counted(chosen) is None
    [row] = preparation.read_samples(chosen, book)
    assert row.text == "Once upon a time."  # type: ignore[union-attr]
    for task in ("sft", "dpo"):
        with pytest.raises(UserError, match=f"plain text, which task {task} ") as refused:
            preparation.read_samples(settings.build({"task": task}), book)
        assert refused.value.advice == "Use --task pretrain, or a JSONL dataset."
    with pytest.raises(UserError, match=r"task pretrain needs plain text \(`text`\)"):
        list(preparation.read_samples(chosen, dataset))


def test_a_dataset_smaller_than_one_batch_is_refused_before_planning(dataset: Path) -> None:
    chosen = settings.build({"dataset": str(dataset), "global_batch_size": 64})
    with pytest.raises(UserError, match="global_batch_size 64 is more than the 57 rows") as refused:
        preparation.plan_run(chosen, HERE, choose=_never)  # type: ignore[arg-type]
    assert refused.value.advice == "Use --global-batch-size 57 or less, or more data."


REWARDS = """
def length(prompt, answer): return len(answer)
def nan(prompt, answer): return float("nan")
def raising(prompt, answer): raise KeyError("no such thing")
"""


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "no reward"),
        ({"reward": "rewards.py:nan"}, "rewards.py:nan returned nan"),
        (
            {"reward": "./model"},
            "rl.reward ./model is not a reward model",
        ),
        ({"reward": "rewards.py:length", "max_completion_length": 256}, "leaves no tokens of seq_len 256"),
    ],
)
def test_unusable_grpo_rewards_are_refused_in_one_line_before_planning(
    values: dict[str, object], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text(REWARDS)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')

    with pytest.raises(UserError) as raised:
        preparation.plan_run(settings.build({"task": "grpo", "rl": values}), HERE, choose=_never)  # type: ignore[arg-type]
    assert problem in raised.value.problem
    assert "\n" not in raised.value.problem


def test_a_grpo_plan_counts_prompts_by_groups_and_generates_with_trl(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Name a prime."}\n' * 20)
    values = {
        "task": "grpo",
        "method": "lora",
        "dataset": str(tmp_path / "prompts.jsonl"),
        "global_batch_size": 32,
        "evaluation": {"fraction": 0},
        "rl": {"reward": f"{tmp_path}/rewards.py:length", "group_size": 8},
    }
    run = preparation.plan_run(settings.build(values), HERE, calibrated=False)
    assert (run.plan.engine, run.plan.layout.sharding, run.settings.engine) == ("trl", "none", "trl")
    assert counted(run.settings) == 20 // (32 // 8)
    assert any(line.startswith("grpo: a process generates") for line in run.plan.why)
    large_batch = settings.build(values | {"global_batch_size": 256})
    with pytest.raises(UserError, match="takes 32 prompts, but there are only 20"):
        preparation.plan_run(large_batch, HERE, calibrated=False)
