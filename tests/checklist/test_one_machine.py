"""A run on one machine states the limits of its PASS and the next command."""

from __future__ import annotations

import shlex

from checklist.judging.thresholds import Table
from checklist.registry import select
from checklist.verdict import judge
from tests.checklist.runs import all_with, cpu_run, gpu_run


def test_a_run_on_one_machine_states_that_speed_is_not_judged() -> None:
    result = judge(cpu_run(2, local=True))
    assert (result.verdict, result.exit_code) == ("PASS", 0)
    assert result.headline == "Software works; speed not judged: all nodes are on this one machine."


def test_a_run_on_one_node_states_which_gpu_speeds_are_judged() -> None:
    assert judge(gpu_run(1, 4, probes=(), pairs=())).headline == (
        "Software works; gemm, hbm, bandwidth as fast as expected; network not judged: there is one node."
    )
    bare_run = all_with(gpu_run(1, 2, probes=(), pairs=()), gpu_names=("a GPU",) * 2)
    assert (
        judge(bare_run, thresholds=Table(())).headline
        == "Software works; speed not judged: there is one node."
    )


def test_runs_on_several_machines_or_without_collectives_print_no_note_about_speed() -> None:
    assert "Software works" not in judge(gpu_run(2)).headline
    assert judge(gpu_run(2)).next_commands == ()
    local = cpu_run(2, local=True)
    assert judge(local, checks=select(only=["mesh", "ranks"])).headline == "3 checks passed."


def test_suggested_commands_are_valid_and_use_the_same_gpus() -> None:
    from checklist.options import CommandOptions, Options, flags

    by_launcher, as_flow = judge(gpu_run(1, 4, probes=(), pairs=())).next_commands
    arguments = shlex.split(by_launcher)
    assert arguments[:5] == ["torchrun", "--nnodes", "2", "--nproc-per-node", "4"]
    assert set(arguments[arguments.index("checklist") + 1 :]) <= {
        f"--{name}" for name in flags(CommandOptions)
    } | {"standard"}
    assert "--nodes 2 --gpus-per-node 4 --profile standard" in as_flow
    assert {"nodes", "gpus_per_node", "profile"} <= set(flags(Options))
    assert "--gpus-per-node" not in judge(cpu_run(2, local=True)).next_commands[1]
