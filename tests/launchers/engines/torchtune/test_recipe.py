"""torchtune recipes train, report, checkpoint, resume and export. Each test starts processes."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from launchers.dataset.prepared import Prepared
from launchers.engines.torchtune.config import recipe_config, recipe_name
from launchers.engines.torchtune.engine import Torchtune
from launchers.gang.job import TrainJob
from launchers.models import tiny_llama
from launchers.report.telemetry import DistInfo, Follower, Memory, Phase, Step
from tests.launchers.engines import counting, ranks
from tests.launchers.engines.loop import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[4]
BATCH, STEPS = 4, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = runs.documents(24)
    return runs.make_data(tmp_path_factory.mktemp("prepared") / "data", rows, batch=BATCH, steps=STEPS)


def job_of(
    work: Path, model: Path, data: Path, *, steps: int = STEPS, world: int = 1, **options: Any
) -> TrainJob:
    """Return a torchtune job; by default in micro batches of two rows."""
    values: dict[str, Any] = {"micro": 2, "accumulation": BATCH // world // 2} | options
    values["settings"] = {"optimizer": {"lr": 3e-3}} | values.get("settings", {})
    return runs.make_job(
        work, model, data, steps=steps, world=world, engine="torchtune", sharding="fsdp", **values
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Any:
    """Finished full runs, each made once: trained(2) on two processes."""

    @functools.cache
    def get(world: int) -> TrainJob:
        job = job_of(tmp_path_factory.mktemp(f"full-{world}"), model, data, world=world, checkpoint_every=3)
        runs.run(job)
        return job

    return get


def test_losses_and_norms_equal_those_of_the_torchtune_command_bit_by_bit(
    trained: Any, tmp_path: Path
) -> None:
    job = trained(1)
    logger = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(tmp_path)}
    values = recipe_config(job) | {"output_dir": str(tmp_path), "metric_logger": logger}
    values["checkpointer"]["output_dir"] = str(tmp_path / "model")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    spec = find_spec("torchtune")
    assert spec.origin is not None
    tune = Path(spec.origin).with_name("_cli") / "tune.py"
    command = ["run", recipe_name(job), "--config", str(tmp_path / "config.yaml")]
    subprocess.run(
        [sys.executable, "-m", "estimator.exact.torchtune_imports", str(tune), *command],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    [log] = tmp_path.glob("log_*.txt")
    logged = [dict(re.findall(r"(\w+):(\S+)", line)) for line in log.read_text().splitlines() if line]
    assert [float(step["loss"]) for step in logged] == runs.losses(runs.steps(job))
    assert [_number(step["grad_norm"]) for step in logged] == [step.grad_norm for step in runs.steps(job)]


def _number(text: str) -> float:
    """Return a logged number or tensor as a float."""
    return float(re.sub(r"tensor\(([^,)]+).*", r"\1", text))


def test_every_rank_reports_every_step_and_its_own_tokens(trained: Any, data: Path) -> None:
    events = list(Follower(trained(2).telemetry_dir).poll())
    prepared = Prepared(data)
    for rank in (0, 1):
        steps = [event for event in events if isinstance(event, Step) and event.rank == rank]
        assert [step.step for step in steps] == list(range(1, STEPS + 1))
        assert [step.samples for step in steps] == [BATCH // 2] * STEPS
        for step in steps:
            rows = prepared.order[(step.step - 1) * BATCH : step.step * BATCH][rank::2]
            assert step.tokens == sum(len(prepared.row(int(row)).tokens) for row in rows)
            assert step.lr is not None
            assert 0 < step.dtf + step.dtb <= step.dt
        assert [step.loss is None for step in steps] == [rank != 0] * STEPS
        phases = [event.name for event in events if isinstance(event, Phase) and event.rank == rank]
        assert phases == ["load", "train", "checkpoint", "train", "save", "done"]
        (info,) = (event for event in events if isinstance(event, DistInfo) and event.rank == rank)
        assert (info.backend, info.device, info.world_size) == ("gloo", "cpu", 2)
        memory = [event for event in events if isinstance(event, Memory) and event.rank == rank]
        assert memory[-1].step == STEPS
        assert memory[-1].rss_peak == max(event.rss_peak for event in memory) > 0


def test_dropout_resumes_from_its_saved_random_state(tmp_path: Path, model: Path, data: Path) -> None:
    settings = {"method": "lora", "lora": {"dropout": 0.1}}
    job = job_of(tmp_path / "whole", model, data, world=2, settings=settings, checkpoint_every=3)
    full_run = runs.run(job)[3:]
    resumed_steps = runs.run(runs.resumed(job, tmp_path / "rest", 3))
    assert [(step.step, step.loss, step.lr, step.grad_norm) for step in resumed_steps] == [
        (step.step, step.loss, step.lr, step.grad_norm) for step in full_run
    ]
    assert [path.name for path in job.checkpoints_dir.iterdir()] == ["step-00000003"]  # none after the last


@pytest.mark.parametrize(("method", "times"), [("lora", 1), ("full", 4)])
def test_gradients_of_adapters_are_reduced_in_the_last_pass_of_a_step_and_those_of_all_weights_in_each(
    tmp_path: Path, model: Path, method: str, times: int
) -> None:
    data = runs.make_data(tmp_path / "data", runs.documents(16), batch=8, steps=2)

    def calls(accumulation: int) -> Counter[str]:
        options = {"micro": 4 // accumulation, "accumulation": accumulation, "settings": {"method": method}}
        job = job_of(tmp_path / str(accumulation), model, data, steps=2, world=2, **options)
        return counting.calls_of(job)

    one, four = calls(1), calls(4)
    in_one_pass = counting.named(one, "reduce_scatter")
    assert in_one_pass > 0
    assert counting.named(four, "reduce_scatter") == times * in_one_pass
    assert all(four[read] == one[read] for read in ("fetched", "branches")), "a pass does not wait"


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_an_optimizer_in_the_backward_pass_trains_as_one_after_it_and_resumes(
    tmp_path: Path, model: Path, data: Path, world: int
) -> None:
    def job(name: str, **optimizer: Any) -> TrainJob:
        settings = {"clip_grad_norm": None, "optimizer": {"lr": 1e-2, **optimizer}}
        options = {"micro": BATCH // world, "accumulation": 1, "checkpoint_every": 3}
        return job_of(tmp_path / name, model, data, world=world, settings=settings, **options)

    inside = job("inside", in_backward=True)
    steps = runs.run(inside)
    after = runs.run(job("after"))
    assert runs.losses(steps) == pytest.approx(runs.losses(after), rel=1e-4)
    assert [step.lr for step in steps] == [step.lr for step in after]
    assert all(step.grad_norm is None and 0 < (step.dtf or 0) + (step.dtb or 0) <= step.dt for step in steps)
    resumed_steps = runs.run(runs.resumed(inside, tmp_path / "again", 3))
    assert [(step.loss, step.lr) for step in resumed_steps] == [(step.loss, step.lr) for step in steps[3:]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("adamw8bit", marks=pytest.mark.nightly),
        "paged-adamw8bit",
        pytest.param("paged-adamw", marks=pytest.mark.nightly),
    ],
)
def test_bitsandbytes_optimizers_learn_in_the_backward_pass_and_resume(
    tmp_path: Path, model: Path, name: str
) -> None:
    data = runs.make_data(tmp_path / "data", runs.documents(BATCH), batch=BATCH, steps=STEPS)
    settings = {"optimizer": {"name": name, "in_backward": True, "lr": 1e-3}}
    options = {"micro": BATCH, "accumulation": 1, "checkpoint_every": 3}
    job = job_of(tmp_path / "work", model, data, settings=settings, **options)
    losses = runs.losses(runs.run(job))
    assert losses[-1] < losses[0] - 0.1
    assert runs.losses(runs.run(runs.resumed(job, tmp_path / "again", 3))) == losses[3:]


def test_a_run_on_two_processes_resumes_on_one(trained: Any, tmp_path: Path) -> None:
    job = trained(2)
    one = runs.run(runs.resumed(job, tmp_path, 3, processes_per_node=1, accumulation=2))
    assert runs.losses(one) == pytest.approx(runs.losses(runs.steps(job)[3:]), rel=1e-5)


def test_packed_rows_have_the_loss_of_the_same_rows_unpacked(tmp_path: Path, model: Path) -> None:
    documents = runs.documents(12)
    groups = [documents[at : at + 3] for at in range(0, 12, 3)]
    packed = [runs.joined(group) for group in groups]
    folder = runs.make_data(tmp_path / "packed", packed, batch=4, steps=1)
    (step,) = runs.run(job_of(tmp_path / "job", model, folder, steps=1, settings={"packing": True}))
    apart = runs.make_data(tmp_path / "apart", documents, batch=12, steps=1)
    (other,) = runs.run(job_of(tmp_path / "job2", model, apart, steps=1, micro=12, accumulation=1))
    assert step.loss == pytest.approx(other.loss, rel=1e-5)
    assert step.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert step.tokens == other.tokens == sum(len(row.tokens) for row in documents)


SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def make_family(folder: Path, family: str) -> Path:
    """Create a small random model of another family, saved by transformers."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

    config: Any = {
        "llama-3.1": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE | {"factor": 8.0}),
        "llama-3.2": lambda: LlamaConfig(
            **SHAPE, rope_parameters=LLAMA3_ROPE | {"factor": 32.0}, tie_word_embeddings=True
        ),
        "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
        "mistral": lambda: MistralConfig(**SHAPE, sliding_window=None, head_dim=16),
        "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=False),
        "qwen2-tied": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    }[family]()
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # large enough for attention, and with it the positions, to matter
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    model.save_pretrained(folder, max_shard_size="200KB" if family == "mistral" else "5GB")
    return folder


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama-3.1", "full"),
        pytest.param("llama-3.2", "full", marks=pytest.mark.nightly),
        pytest.param("llama-3.2", "lora", marks=pytest.mark.nightly),
        ("llama-tied", "full"),
        ("mistral", "lora"),
        ("qwen2", "lora"),
        pytest.param("qwen2-tied", "full", marks=pytest.mark.nightly),
    ],
)
def test_a_family_has_the_losses_of_transformers_and_its_export_is_complete(
    tmp_path: Path, data: Path, family: str, method: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = make_family(tmp_path / "model", family)
    options = {"micro": 4, "accumulation": 1, "settings": {"method": method}}
    job = job_of(tmp_path / "job", model, data, steps=2, **options)
    steps = runs.run(job)
    expected = runs.mean_loss(runs.load(model), runs.documents(BATCH))
    assert steps[0].loss == pytest.approx(expected, rel=1e-4)
    Torchtune().collect(job, tmp_path / "out")
    exported, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out" / "model", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    base = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert (exported(ids).logits - base(ids).logits).abs().max() > 1e-3
    if method == "lora":
        from peft import PeftModel

        adapted = PeftModel.from_pretrained(base, str(tmp_path / "out" / "adapter")).eval()
        with torch.no_grad():
            assert (adapted(ids).logits - exported(ids).logits).abs().max() < 1e-3


def train_traced(job: TrainJob) -> None:
    """Train with tracing and partitioning of torch.compile, without generated code."""
    os.environ["TORCH_COMPILE_BACKEND"] = "aot_eager"
    Torchtune().train(job)


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("llama", "qlora"),
        ("qwen2", "lora"),
        pytest.param("llama", "full", marks=pytest.mark.nightly),
        pytest.param("mistral", "lora", marks=pytest.mark.nightly),
    ],
)
def test_compiled_layers_have_the_losses_of_eager_layers_on_packed_rows(
    tmp_path: Path, model: Path, family: str, method: str
) -> None:
    rows = runs.documents(12)
    packed = [runs.joined(rows[first : first + 3]) for first in range(0, 12, 3)]
    data = runs.make_data(tmp_path / "data", packed, batch=BATCH, steps=2)
    base = model if family == "llama" else make_family(tmp_path / "model", family)
    eager, compiled = (
        job_of(
            tmp_path / str(on),
            base,
            data,
            steps=2,
            activation_checkpointing=method == "qlora",
            settings={"method": method, "compile": on},
        )
        for on in (False, True)
    )
    done = ranks.train([compiled], limit_s=400, entry=f"{__name__}:train_traced")
    assert done.returncode == 0, done.stderr[-6000:]
    expected = runs.losses(runs.run(eager))
    assert runs.losses(runs.steps(compiled)) == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 2


def test_bf16_activation_checkpointing_and_other_settings_train(
    tmp_path: Path, model: Path, data: Path
) -> None:
    job = job_of(
        tmp_path,
        model,
        data,
        world=2,
        micro=1,
        accumulation=2,
        precision="bf16",
        activation_checkpointing=True,
        settings={
            "optimizer": {"name": "sgd", "lr": 0.1},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "clip_grad_norm": None,
            "engine_options": {"loss": {"num_output_chunks": 2}},
        },
        checkpoint_every=4,
    )
    steps = runs.run(job)
    written = yaml.safe_load((job.work_dir / "engine" / "torchtune.yaml").read_text())
    assert written["loss"]["num_output_chunks"] == 2
    assert runs.losses(steps)[-1] < runs.losses(steps)[0]
    assert [step.lr for step in steps] == [0.1] * STEPS
    assert all(step.grad_norm for step in steps)
    Torchtune().collect(job, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    resumed_steps = runs.run(runs.resumed(job, tmp_path / "rest", 4))
    assert runs.losses(resumed_steps) == runs.losses(steps)[4:]
