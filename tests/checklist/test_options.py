"""Impossible options are refused in two lines before measuring."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checklist import registry
from checklist.effort import EFFORTS
from checklist.options import Options, build, names
from estimator.errors import UserError


def test_the_default_is_the_quick_profile_on_two_nodes_with_all_checks() -> None:
    options = Options()
    assert (options.profile, options.nodes) == ("quick", 2)
    assert options.checks == tuple(registry.CHECKS.values())
    assert options.phases == ("facts", "mesh", "node", "world", "pairs")


@pytest.mark.parametrize(
    ("values", "problem", "advice"),
    [
        ({"profile": "quik"}, "There is no profile 'quik'.", "Did you mean quick?"),
        ({"nodes": 0}, "--nodes 0 is out of range.", "from 1 to"),
        ({"gpus_per_node": 0}, "--gpus-per-node 0 must be at least 1.", "all GPUs"),
        ({"skip": ("everything",)}, "There is no check 'everything'.", "Checks: ranks, gpus,"),
        ({"only": ("mesh",), "skip": ("mesh",)}, "No check is selected.", "--skip"),
        ({"device": "gpu"}, "There is no device 'gpu'.", "It takes auto, cpu, cuda."),
        ({"phase_timeouts": {"mesh": 0}}, "A time limit of 0 s for phase mesh must be above 0.", "seconds"),
        ({"op_timeout": float("nan")}, "A time limit of nan s for an operation must be above 0.", "seconds"),
    ],
)
def test_impossible_options_are_refused_in_two_lines(
    values: dict[str, Any], problem: str, advice: str
) -> None:
    with pytest.raises(UserError) as error:
        build(Options, values)
    assert error.value.problem == problem
    assert advice in error.value.advice


def test_selected_checks_run_only_the_phases_that_they_need() -> None:
    options = Options(only=("pairs",))
    assert [check.name for check in options.checks] == ["pairs", "hangs"]
    assert options.phases == ("facts", "pairs")


def test_hangs_are_monitored_even_if_the_check_is_skipped() -> None:
    assert "hangs" in {check.name for check in Options(skip=("hangs", "storage")).checks}


def test_more_gpus_than_available_are_refused_with_the_available_number() -> None:
    with pytest.raises(UserError, match="--gpus-per-node 8 is more than the 4 of this machine"):
        Options(gpus_per_node=8).processes_per_node(4)
    with pytest.raises(UserError, match="There is no GPU on this machine"):
        Options(device="cuda").processes_per_node(0)


def test_the_number_of_processes_is_that_of_gpus_or_on_cpus_the_configured_one() -> None:
    assert (Options().processes_per_node(8), Options().processes_per_node(0)) == (8, 1)
    assert Options(gpus_per_node=3).processes_per_node(0) == 3
    assert Options(device="cpu").processes_per_node(8) == 1


def test_a_deeper_profile_runs_more_phases_with_longer_limits() -> None:
    quick, standard, deep = EFFORTS.values()
    for less, deeper in ((quick, standard), (standard, deep)):
        assert less.largest_cuda <= deeper.largest_cuda
        assert less.iterations < deeper.iterations
        assert less.op_limit_s < deeper.op_limit_s
    assert (Options().limit_s("mesh"), Options(phase_timeouts={"mesh": 5}).limit_s("mesh")) == (60, 5)
    assert Options(nodes=32).limit_s("pairs") > Options(nodes=4).limit_s("pairs")


def test_equal_options_are_pickled_to_the_same_bytes_in_every_process() -> None:
    """Metaflow compares the pickled values of several nodes."""
    code = (
        "import pickle, sys; from checklist.options import Options;"
        "options = Options(nodes=3, only='mesh,pairs', device='cpu', directory='work', seed=4, timeout=5);"
        "assert pickle.loads(pickle.dumps(options)) == options;"
        "sys.stdout.buffer.write(pickle.dumps(options))"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(set(texts)) == 1


def test_options_survive_json() -> None:
    options = Options(nodes=3, only=("mesh",), directory=Path("work"), phase_timeouts={"mesh": 5.0})
    assert build(Options, options.model_dump(mode="json")) == options


def test_names_of_checks_are_accepted_in_every_notation() -> None:
    assert names("mesh, pairs,") == ("mesh", "pairs")
    assert names(["mesh,gemm", "pairs"]) == ("mesh", "gemm", "pairs")
    assert names("") == ()


def test_only_the_same_check_with_an_equal_or_deeper_profile_clears_a_verdict() -> None:
    gemm, mesh = registry.find("gemm"), registry.find("mesh")
    assert registry.clears(gemm, "deep", gemm, "standard")
    assert registry.clears(gemm, "standard", gemm, "standard")
    assert not registry.clears(gemm, "quick", gemm, "standard")
    assert not registry.clears(mesh, "deep", gemm, "quick")
    assert registry.clears(mesh, "quick", mesh, "deep"), "a profile doesn't change what the mesh asks"
