"""Steps without a plan: declared sizes, and sizes recommended from history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decorators import sizing
from decorators._metaflow import StepView
from decorators.backends.options import Options
from decorators.sizing import SizeArguments
from decorators.usage import digest_parameters, ending_of
from estimator.errors import UserError
from estimator.rightsizing import machines
from estimator.rightsizing.machines import Needs
from estimator.rightsizing.recommend import MEMORY_UNIT_MIB
from estimator.rightsizing.usage import Sizes
from launchers.gang.failures import Failure, RankFailed
from tests.decorators.backends.steps import RecordedStep
from tests.decorators.conftest import Home
from tests.warm_python import WarmPython

GIB = 2**30


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """A folder whose flows share a Python process that has imported Metaflow and the decorator."""
    home = Home(tmp_path_factory.mktemp("sized"))
    (home.path / ".metaflow").mkdir()
    modules = ("metaflow.cli", "metaflow.runtime", "decorators.gpu_profile", "decorators.sizing")
    with WarmPython(*modules, environment=home.environment(), folder=home.path) as warm:
        yield Home(home.path, warm)


@pytest.mark.parametrize("text", ["40GiB", "40Gi", "40 GiB", 40 * GIB, "{size}"])
def test_a_size_is_accepted_in_every_common_notation(text: Any) -> None:
    needs, gpu = SizeArguments(memory=text).needs({"size": "40GiB"})
    assert (needs, gpu) == (Needs(memory_mib=40 * 1024), None)


def test_a_gpu_by_name_or_memory_is_one_gpu_unless_a_number_is_set() -> None:
    assert SizeArguments(gpu="A100-80GB").needs({}) == (Needs(gpus=1), "A100-80GB")
    assert SizeArguments(gpus="{n}").needs({"n": 2}) == (Needs(gpus=2), None)
    needs, _ = SizeArguments(gpu_memory="40GiB", gpus=2).needs({})
    assert (needs.gpus, needs.gpu_memory_bytes) == (2, 40 * GIB)


@pytest.mark.parametrize(("name", "value"), [("memory", "much"), ("memory", 40), ("gpus", 1.5), ("cpu", 0)])
def test_an_invalid_size_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"@gpu_profile\({name}="):
        SizeArguments(**{name: value}).needs({})


@pytest.mark.parametrize(
    ("recommended", "current", "expected"),
    [
        (Sizes(cpu=3, memory_mib=900), Sizes(cpu=6, memory_mib=2000), (3, 900)),
        (Sizes(), Sizes(cpu=6, memory_mib=2000), (6, 2000)),
        (Sizes(), Sizes(), (machines.USUAL_CPU, machines.USUAL_MEMORY_MIB)),
    ],
)
def test_sizes_without_a_recommendation_are_the_current_or_default_ones(
    recommended: Sizes, current: Sizes, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing.usage, "sizes_of_step", lambda _: current)
    monkeypatch.setattr(sizing, "needs_of", lambda *_: None)
    recommendation: Any = SimpleNamespace(sizes=recommended)
    request = sizing._request_of(recommendation, cast("StepView", RecordedStep("local")), Options())
    assert (request.cpu, request.memory_mib, request.gpus_per_node) == (*expected, 0)


def test_parameter_digests_are_comparable_and_hide_text() -> None:
    digests = digest_parameters({"rows": 128, "lr": 1e-5, "on": True, "key": "sk-secret", "none": None})
    assert digests["rows"] == "128"
    assert digests["lr"] == "1e-05"
    assert "secret" not in json.dumps(digests)
    assert digests == digest_parameters(
        {"rows": 128, "lr": 1e-5, "on": True, "key": "sk-secret", "none": None}
    )


def test_running_out_of_memory_is_distinguished_from_other_failures() -> None:
    def failed(message: str, *, out_of_memory: bool) -> RankFailed:
        failure = Failure(kind="rank", node=0, host="a", at=0.0, message=message, out_of_memory=out_of_memory)
        return RankFailed(failure)

    assert ending_of(None) == "succeeded"
    assert ending_of(MemoryError()) == "out of memory"
    assert ending_of(ValueError("out of memory")) == "failed"
    assert ending_of(failed("torch.OutOfMemoryError: CUDA out of memory", out_of_memory=True)) == (
        "out of GPU memory"
    )
    assert ending_of(failed("DefaultCPUAllocator: can't allocate memory", out_of_memory=True)) == (
        "out of memory"
    )
    assert ending_of(failed("KeyError: 1", out_of_memory=False)) == "failed"


@pytest.mark.slow
def test_over_five_runs_memory_follows_usage_and_an_out_of_memory_step_recovers(home: Home) -> None:
    def run(mib: int) -> tuple[int, str]:
        done = home.run("sized.py", "run", "--limited", "true", "--mib", str(mib))
        return done.returncode, done.stdout + done.stderr

    requested = []
    for _ in range(3):
        assert run(100)[0] == 0
        large = home.artifacts("SizedFlow", "large", "requested")["requested"]
        small = home.artifacts("SizedFlow", "small", "requested")["requested"]
        requested.append((small.memory_mib, large.memory_mib))
    assert requested[0] == (8000, 8000), "the flow's own sizes, before anything is known"
    assert 300 < requested[1][0] <= requested[1][1] < 1000
    assert requested[2][1] <= requested[1][1] + MEMORY_UNIT_MIB  # usage differs by a little between runs
    assert home.artifacts("SizedFlow", "end", "requested")["requested"].memory_mib == 1024

    too_much = requested[2][1]  # with Python itself more than requested, and less than 1.5 times as much
    status, output = run(too_much)
    assert status == 1
    assert "MemoryError" in output
    status, output = run(too_much)
    assert status == 0, output
    assert "ran out of memory" in output
    recovered = home.artifacts("SizedFlow", "large", "requested")["requested"]
    assert recovered.memory_mib >= 1.5 * requested[2][1]

    done = home.python("-m", "estimator.cli.app", "rightsize", "SizedFlow", "--json")
    reports = {report["step"]: report for report in json.loads(done.stdout)}
    assert set(reports) == {"small", "large", "end"}
    assert reports["large"]["out_of_memory"] == 1
    assert reports["small"]["tasks"] == 5
    assert reports["small"]["resources"].startswith("@resources(cpu=")


@pytest.mark.slow
def test_values_of_the_with_option_override_history(home: Home) -> None:
    done = home.run("plain.py", "run", "--with", "gpu_profile:rightsize=true")
    assert done.returncode == 0, done.stderr
    assert "start: no comparable earlier task; sizes in the flow are unchanged." in done.stderr
    done = home.run(
        "plain.py", "run", "--with", "gpu_profile:rightsize=true", "--with", "resources:memory=7000"
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("start:")]
    assert "6.84 GiB" in line


def test_sizes_that_this_machine_lacks_are_refused_before_a_run(home: Home) -> None:
    done = home.run("plain.py", "run", "--with", "gpu_profile:gpus=64")
    assert done.returncode == 1
    assert "the step asks for 64x GPU" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_flow_without_records_is_named_with_advice(home: Home) -> None:
    done = home.python("-m", "estimator.cli.app", "rightsize", "NoSuchFlow")
    assert done.returncode == 2
    assert "No step of NoSuchFlow has a record of its usage." in done.stderr
