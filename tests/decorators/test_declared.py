"""A step planned from the arguments of its decorator."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import metaflow
import pytest

from decorators.arguments import OWN_ARGUMENTS
from decorators.declared import DeclaredPlan, fill, summarize
from decorators.profiler import Profile
from estimator.errors import UserError
from estimator.hardware import local_machine
from estimator.job import Machine
from estimator.plan import Override
from tests.decorators.conftest import FLOWS, Home
from tests.decorators.flows.plans import make_plan
from tests.warm_python import WarmPython

GIB = 2**30
WORKSTATION = Machine(
    gpus=(("NVIDIA H100 80GB HBM3", 80 * GIB), ("NVIDIA H100 80GB HBM3", 80 * GIB)),
    cpu_cores=32,
    ram_bytes=256 * GIB,
    disk_free_bytes=2000 * GIB,
)


@pytest.fixture
def workstation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Plan for a machine with two H100 without measurements of earlier runs."""
    monkeypatch.setattr(local_machine, "detect", lambda: WORKSTATION)
    monkeypatch.setenv("FINETUNE_CALIBRATION", str(tmp_path / "calibration.jsonl"))


def test_options_and_parameters_decide_the_plan(workstation: None) -> None:
    resolver = DeclaredPlan(
        {"model": "{model}", "method": "lora", "seq_len": "{length}", "global_batch_size": 16, "gpus": 1}
    )
    plan = resolver({"model": "llama-8b", "length": 1024}, "local")
    assert (plan.model, plan.method, plan.layout.seq_len) == ("llama-8b", "lora", 1024)
    assert plan.layout.global_batch_size == 16
    assert plan.layout.processes_per_node == 1
    assert resolver({"model": "llama-8b", "length": 1024}, "local", 2).layout.processes_per_node == 2


def test_processes_on_cpus_are_planned_next_to_gpus(workstation: None) -> None:
    options = {"model": "tiny-llama", "device": "{device}", "gpus": 2, "seq_len": 128}
    layout = DeclaredPlan(options)({"device": "cpu"}, "local").layout
    assert (layout.device, layout.processes_per_node) == ("cpu", 2)


@pytest.mark.parametrize(
    ("options", "named", "advised"),
    [
        ({"model": "llama-8b", "metod": "lora"}, "metod", "method"),
        ({"model": "llama-8b", "seq_len": "long"}, "seq_len", "finetune plan --help"),
        ({"model": "{modl}"}, "modl", "model"),
        ({"model": "llama-8c"}, "llama-8c", "llama-8b"),
        ({"model": "llama-8b", "method": "loraa"}, "method=loraa", "lora"),
        ({"seq_len": 128}, "model", 'model="'),
        ({"model": "llama-8b", "device": "tpu"}, "device=tpu", "cpu"),
        ({"model": "llama-8b", "seq_len": 0}, "@gpu_profile(seq_len=0) must be a whole number", "Correct"),
        ({"model": "llama-70b", "method": "full", "gpus": 1}, "llama-70b", "method"),
    ],
)
def test_an_invalid_argument_is_named_with_a_valid_example(
    workstation: None, options: dict[str, Any], named: str, advised: str
) -> None:
    with pytest.raises(UserError) as error:
        DeclaredPlan(options)({"model": "llama-8b"}, "local")
    assert named in error.value.problem
    assert advised in error.value.advice
    assert not re.search(r"--(?!help|with)", error.value.problem)


def test_references_keep_the_type_of_the_parameter_and_may_be_part_of_a_string() -> None:
    assert fill("{steps}", {"steps": 7}, "here") == 7
    assert fill("s3://models/{name}", {"name": "mine"}, "here") == "s3://models/mine"
    assert fill(7, {}, "here") == 7


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    home = Home(tmp_path_factory.mktemp("warm"))
    modules = ("metaflow.cli", "metaflow.runtime", "decorators.gpu_profile", "estimator.cli.plan")
    with WarmPython(*modules, environment=home.environment(), folder=home.path) as started:
        yield started


def test_each_step_has_a_plan_for_its_own_job_and_its_measurements(home: Home, warm: WarmPython) -> None:
    home = Home(home.path, warm)
    done = home.run("declared.py", "run", "--length", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {line.split(":")[0] for line in done.stderr.splitlines() if "tiny-llama, " in line} == {
        "train",
        "again",
    }
    train = home.artifacts("DeclaredFlow", "train", "plan", "measured")
    assert (train["plan"].method, train["plan"].layout.seq_len) == ("lora", 64)
    assert train["measured"].steps == 3
    assert train["measured"].own_loop
    assert train["measured"].tokens_per_second == pytest.approx(2048)
    assert train["measured"].ranks[0].rss_peak_bytes > 20 << 20
    plan_again = home.artifacts("DeclaredFlow", "again", "plan")["plan"]
    assert (plan_again.method, plan_again.layout.seq_len) == ("full", 256)


def test_an_invalid_decorator_argument_starts_no_run(home: Home, warm: WarmPython) -> None:
    home = Home(home.path, warm)
    done = home.run("declared.py", "run", "--model", "llama-8c")
    assert done.returncode == 1  # as Metaflow ends any flow whose decorator refuses
    assert "Traceback" not in done.stdout + done.stderr
    assert "llama-8c" in done.stderr
    assert home.runs("DeclaredFlow") == []


@pytest.mark.parametrize("written", ["@gpu_profile", '@gpu_profile(model="llama-8b")'])
def test_the_decorator_below_step_is_refused_in_one_line(home: Home, written: str) -> None:
    flow = (FLOWS / "declared.py").read_text()
    flow = re.sub(r"    @gpu_profile\(model=\"\{.*\n    @step\n", f"    @step\n    {written}\n", flow)
    (home.path / "below.py").write_text(flow)
    done = home.python("below.py", "run")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "train" in done.stderr


def test_a_planning_function_that_returns_no_plan_is_named(home: Home, warm: WarmPython) -> None:
    text = (FLOWS / "plain.py").read_text()
    assert text.count("    @step\n    def start") == 1
    text = text.replace("    @step\n    def start", "    @gpu_profile(plan=chosen)\n    @step\n    def start")
    function = "from metaflow import gpu_profile\n\n\ndef chosen(parameters, backend):\n    return 3\n"
    flow = home.path / "wrong.py"
    flow.write_text(text.replace("\n\nclass ", f"\n\n{function}\n\nclass ", 1))
    done = Home(home.path, warm).run(str(flow), "run")
    assert done.returncode == 1
    assert "@gpu_profile(plan=chosen) returned int, which is not a Plan." in done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_reading_the_plan_of_a_step_without_one_is_a_user_error_with_advice() -> None:
    for step, expected_line in (("start", "Step start has no plan"), ("", "outside of a step")):
        with pytest.raises(UserError, match=expected_line):
            _ = Profile(plan=None, step=step).plan
    carried = make_plan({}, "local")
    assert Profile(plan=None, step="start", about=carried).plan == carried


def test_the_signature_has_every_accepted_argument_with_its_type_and_default() -> None:
    parameters = inspect.signature(metaflow.gpu_profile).parameters
    assert {"model", "method", "seq_len", "gpus", "nodes", "memory", "rightsize", "request"} <= set(
        parameters
    )
    assert {item.kind for item in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert (parameters["seq_len"].annotation, parameters["seq_len"].default) == (int | None, None)
    accepted = {name: item.default for name, item in parameters.items() if name not in OWN_ARGUMENTS}
    planned = set(accepted) - {"cpu", "memory", "gpu_memory"}
    DeclaredPlan({name: accepted[name] for name in planned} | {"model": "tiny-llama"})._resolve({})


def test_the_summary_on_cpus_counts_processes() -> None:
    assert "needed per process" in summarize(make_plan({}, "local"))
    assert "needed per GPU" in summarize(make_plan({}, "kubernetes"))


def test_the_summary_lists_the_values_set_by_the_user() -> None:
    plan = make_plan({}, "local")
    assert len(summarize(plan).splitlines()) == 2
    override = Override(name="cpu", planned="4", used="2", given_by="@resources in the flow")
    lines = summarize(plan.with_override(override)).splitlines()
    assert lines[2:] == ["  Overridden: cpu 2 instead of 4 (@resources in the flow)"]
