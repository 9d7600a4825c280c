"""``finetune plan --from-cluster``: the command in a process of its own, against a server of nodes."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from estimator.cli.app import app
from launchers import settings
from launchers.settings.options import translate
from tests.estimator.hardware.cluster.test_machines import (
    Api,
    bare_metal,
    eks_p5,
    gke_l4,
    serving_api,
    write_kubeconfig,
)


def run(home: Path, url: str, *words: str) -> subprocess.CompletedProcess[str]:
    (home / ".kube").mkdir(exist_ok=True)
    write_kubeconfig(home, training=url)
    asked = ["plan", "--from-cluster", *words]
    variables = {"KUBECONFIG": str(home / ".kube" / "config")}
    done = CliRunner().invoke(app, asked, prog_name="finetune", env=variables)
    return subprocess.CompletedProcess(asked, done.exit_code, done.stdout, done.stderr)


def plans(home: Path, nodes: list[dict[str, Any]], *words: str) -> list[dict[str, Any]]:
    with serving_api(Api(nodes=nodes)) as url:
        done = run(home, url, *words, "--json")
    assert done.returncode == 0, done.stderr
    return [plan["request"] for plan in json.loads(done.stdout)["plans"]]


def shown(home: Path, api: Api, *words: str) -> str:
    """What the command prints for people, standard error first."""
    with serving_api(api) as url:
        done = run(home, url, *words)
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def test_a_job_too_large_for_the_cluster_is_one_clear_error(tmp_path: Path) -> None:
    with serving_api(Api(nodes=[gke_l4(1)])) as url:
        done = run(tmp_path, url, "--model", "llama-70b", "--method", "full")
    assert done.returncode == 1
    assert "llama-70b" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_output_ends_with_the_command_that_runs_the_first_plan(tmp_path: Path) -> None:
    text = shown(
        tmp_path, Api(nodes=[eks_p5(1), eks_p5(2)]), "--model", "llama-8b", "--method", "lora", "--nodes=1"
    )
    last = text.strip().splitlines()[-1]
    assert last.startswith("To run the first: finetune run --with kubernetes --model llama-8b")
    for words in ("--method lora", "--instance-type p5.48xlarge", "--nodes 1 --gpus "):
        assert words in last


def test_an_unlabeled_gpu_is_assumed_to_be_that_of_the_option_and_reported(tmp_path: Path) -> None:
    api = Api(nodes=[bare_metal("plain", {}, gpus="8")])
    words = ("--model", "llama-8b", "--method", "lora")
    with serving_api(api) as url:
        done = run(tmp_path, url, *words)
    assert done.returncode == 2
    assert "set it with --gpu NAME: plain" in done.stderr
    text = " ".join(shown(tmp_path, api, *words, "--gpu", "H100 SXM").split())
    assert "no label of 8x H100 SXM names its GPU: H100 SXM is assumed" in text
    assert "--gpu 'H100 SXM'" in text


def test_the_command_selects_untyped_nodes_by_gpu_and_tolerates_their_taint(tmp_path: Path) -> None:
    own = {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    fenced = bare_metal("a100", own, gpus="8")
    fenced["spec"]["taints"] = [{"key": "dedicated", "value": "research", "effect": "NoSchedule"}]
    text = shown(tmp_path, Api(nodes=[fenced]), "--model", "llama-8b", "--method", "lora")
    assert "Skipped, untolerated taint dedicated=research:NoSchedule: a100" in text
    command = shlex.split(text.strip().splitlines()[-1].partition(": ")[2])
    assert command[command.index("--gpu") + 1] == "A100 SXM 80GB"
    name, _, tolerations = command[command.index("--with") + 1].partition("=")
    assert name == "kubernetes:tolerations"
    assert json.loads(tolerations) == [
        {"key": "dedicated", "operator": "Equal", "effect": "NoSchedule", "value": "research"}
    ]
    assert "Price       unknown" in text


def test_the_command_keeps_the_options_of_the_user(tmp_path: Path) -> None:
    words = [
        "--model",
        "llama-8b",
        "--method",
        "lora",
        "--lora-rank",
        "16",
        "--lora-targets",
        "q_proj,v_proj",
    ]
    words += ["--seq-len", "4096", "--global-batch-size", "64", "--packing", "--optimizer", "sgd"]
    words += ["--no-activation-checkpointing", "--namespace", "research", "--micro-batch-size", "1"]
    (last,) = [
        line
        for line in shown(tmp_path, Api(nodes=[eks_p5(1)]), *words).splitlines()
        if line.startswith("To run the first: ")
    ]
    variable, *command = shlex.split(last.partition(": ")[2])
    assert variable == "METAFLOW_KUBERNETES_NAMESPACE=research"
    given = translate(command[2:], (), ["--with", "--set"])
    values = [value for option, value in itertools.pairwise(given) if option == "--set"]
    chosen = settings.build({}, values)
    assert (chosen.optimizer.name, chosen.activation_checkpointing, chosen.lora.rank) == ("sgd", False, 16)
    assert (chosen.seq_len, chosen.global_batch_size, chosen.packing) == (4096, 64, True)
    assert chosen.lora.targets == ("q_proj", "v_proj")


def test_the_command_uses_all_linear_for_models_whose_layer_names_are_not_llamas(tmp_path: Path) -> None:
    words = ["--model", "mixtral-8x7b", "--method", "dora", "--global-batch-size", "16", "--lora-targets"]
    text = shown(tmp_path, Api(nodes=[eks_p5(1)]), *words, "q_proj,k_proj,v_proj,o_proj")
    assert "--lora-targets all-linear" in text
    plain = shown(tmp_path, Api(nodes=[eks_p5(1)]), *words, "all-linear")
    assert "--lora-targets" not in plain.partition("To run the first")[2], "the default"


def test_the_command_keeps_the_task(tmp_path: Path) -> None:
    words = ["--model", "llama-8b", "--method", "full", "--engine", "fsdp2", "--seq-len", "512"]
    assert "--task pretrain" in shown(tmp_path, Api(nodes=[eks_p5(1)]), *words, "--task", "pretrain")
    assert "--task" not in shown(tmp_path, Api(nodes=[eks_p5(1)]), *words)


def test_a_plan_that_cannot_be_launched_has_a_comment_instead_of_a_command(tmp_path: Path) -> None:
    text = shown(
        tmp_path, Api(nodes=[eks_p5(1)]), "--model", "llama-8b", "--method", "full", "--engine", "megatron"
    )
    assert "To run the first: No command runs this plan: engine megatron is planned only" in text
