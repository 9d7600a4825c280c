"""What the planner's page is answered: the plans of `finetune plan`, or one line and what would work."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from estimator import hardware, models
from estimator.cli.app import app, load
from estimator.models.hf_config import to_spec
from estimator.planner_page import answers, fields
from tests.estimator.cli import test_plan_from_cluster as by_command
from tests.estimator.hardware.cluster.test_machines import CPU_NODE, eks_p5, gke_l4
from tests.estimator.models.hf_configs import config_of
from tests.estimator.models.test_vision import GEMMA3
from tests.estimator.planner_page.forms import FORMS

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
NO_GPUS = {"items": [{"kind": "Node", **CPU_NODE}]}


def test_image_options_change_the_plan_and_its_command() -> None:
    """Gemma 3 4B by its config.json."""
    config = GEMMA3 | {"text_config": config_of(models.find("gemma-3-4b"))}
    form = {"config": json.dumps(config), "method": "lora", "vision": "lora", "images_per_row": "2"}
    response = answers.answer(form)
    assert "--vision lora --images-per-row 2" in response["command"]
    assert "vision tower" in {part["name"] for part in response["plans"][0]["categories"]}
    assert "--vision lora" in response["plans"][0]["run"]


def test_an_offload_is_planned_with_the_engine_that_has_it() -> None:
    form = {"model": "llama-8b", "gpu": "L40S", "gpus": "1", "nodes": "1", "zero_offload": "cpu"}
    assert {plan["engine"] for plan in answers.answer(form)["plans"]} == {"deepspeed"}
    assert "contradict" in answers.answer(form | {"fsdp_offload": "cpu"})["problem"]


def of_command(command: str) -> dict[str, Any]:
    """What that command answers: its rows, or what it says where it has none."""
    words = [*shlex.split(command)[1:], "--json", "--no-calibration"]
    done = CliRunner().invoke(app, words, prog_name="finetune")
    return {"rows": json.loads(done.stdout)["summary"]} if done.exit_code == 0 else {"said": done.stderr}


def row_of(plan: dict[str, Any]) -> dict[str, Any]:
    """Of a plan of the page what the command has, too."""
    return {name: value for name, value in plan.items() if name not in answers.ADDED}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: " ".join(map(str, form.values())))
def test_the_page_gives_the_result_of_the_command_that_it_shows(form: dict[str, str]) -> None:
    response = answers.answer(form)
    expected = of_command(response["command"])
    if "plans" in response:
        assert [row_of(plan) for plan in response["plans"]] == expected["rows"]
    else:
        said = " ".join(expected["said"].split())
        assert response["problem"] in said
        assert len(response["suggestions"]) == said.count("finetune plan ")


def test_every_field_is_an_option_of_plan_with_a_unique_name() -> None:
    command = load("plan")
    assert isinstance(command, typer.core.TyperCommand)
    options = {option for parameter in command.params for option in parameter.opts}
    assert {field.option for field in fields.FIELDS} <= options
    assert len(fields.OF_NAME) == len(fields.FIELDS)


def test_the_bars_of_a_plan_sum_to_the_needed_memory() -> None:
    for plan in answers.answer({"model": "llama-70b"})["plans"]:
        assert sum(part["bytes"] for part in plan["categories"]) == plan["needs_bytes"]
        looks = [(part["color"], part["pattern"]) for part in plan["categories"]]
        assert len(set(looks)) == len(looks)


def test_suggested_changes_of_fields_give_a_plan() -> None:
    form = {"model": "llama-70b", "gpu": "L4", "nodes": "1", "gpus": "1"}
    response = answers.answer(form)
    assert "% over" in response["problem"]
    assert len(response["suggestions"]) == 3
    for suggestion in response["suggestions"]:
        assert answers.answer(form | suggestion["fields"])["plans"], suggestion


def test_a_pasted_config_gives_the_model_of_a_folder_with_that_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    response = answers.answer({"config": json.dumps(CONFIG), "method": "lora"})
    command = response["command"].replace(fields.MY_MODEL, str(tmp_path))
    named = [plan | {"model": str(tmp_path)} for plan in response["plans"]]
    assert [row_of(plan) for plan in named] == of_command(command)["rows"]
    assert response["plans"][0]["run"].startswith(
        f"finetune run --with kubernetes --model {fields.MY_MODEL} "
    )
    assert to_spec(CONFIG, "x").parameters == models.find("qwen2.5-7b").parameters


def test_pasted_nodes_give_the_plan_of_a_queried_cluster(tmp_path: Path) -> None:
    nodes = [{"kind": "Node", **node} for node in (eks_p5(1), eks_p5(2), gke_l4(3), CPU_NODE)]
    response = answers.answer(
        {"model": "llama-70b", "method": "lora", "cluster": json.dumps({"items": nodes})}
    )
    asked = by_command.plans(tmp_path, nodes, "--model", "llama-70b", "--method", "lora", "--no-calibration")
    for mine, theirs in zip(response["plans"], asked, strict=True):
        for name in ("instance_type", "nodes", "gpus_per_node", "gpu_type"):
            assert mine[name] == theirs[name]
    assert any("usage of the nodes (paste the pods too)" in note for note in response["notes"])
    assert response["command"] == "finetune plan --model llama-70b --method lora --from-cluster"


def test_a_plan_names_the_pasted_pods_that_it_waits_for() -> None:
    nodes = [{"kind": "Node", **eks_p5(number)} for number in (1, 2)]
    holder = {
        "kind": "Pod",
        "metadata": {"name": "other", "namespace": "team"},
        "spec": {
            "nodeName": "ip-10-0-0-1.ec2.internal",
            "containers": [{"name": "c", "resources": {"requests": {"nvidia.com/gpu": "8"}}}],
        },
    }

    def plan_text(phase: str) -> str:
        items = [*nodes, {**holder, "status": {"phase": phase}}]
        form = {"model": "llama-70b", "method": "full", "cluster": json.dumps({"items": items})}
        return str(answers.answer(form)["plans"][0]["text"])

    assert "the run waits: 8 of these 16 H100 SXM are in use now, by team/other" in plan_text("Running")
    assert "the run waits" not in plan_text("Succeeded")


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        ({}, "No model is chosen"),
        ({"model": "llama-9000b"}, "There is no model 'llama-9000b'"),
        ({"model": "llama-8b", "seq_len": "long"}, "--seq-len long is not a whole number above 0"),
        ({"model": "llama-8b", "tokens": "many"}, "--tokens many is not a number of tokens"),
        ({"model": "llama-8b", "color": "red"}, "The form has no field color"),
        ({"config": "{"}, "The pasted config.json is not JSON"),
        ({"config": "[]"}, "The pasted config.json is not a JSON object"),
        ({"model": "llama-8b", "cluster": "{}"}, "There are no nodes in the pasted text"),
        (
            {"model": "llama-8b", "cluster": '{"items": [{"kind": "Node"}]}'},
            "A pasted node or pod is incomplete",
        ),
        (
            {"model": "llama-8b", "cluster": json.dumps({"items": [{"kind": "Node", **CPU_NODE}]})},
            "No node of the pasted cluster",
        ),
    ],
)
def test_an_invalid_field_gives_a_one_line_problem(form: dict[str, str], problem: str) -> None:
    response = answers.answer(form)
    assert problem in response["problem"]
    assert "\n" not in response["problem"]
    assert "plans" not in response


def test_all_clouds_machines_and_gpus_of_the_catalogue_are_choices() -> None:
    assert set(fields.OF_NAME["cloud"].choices) == {item.cloud for item in hardware.instances()}
    assert "H100 SXM" in fields.OF_NAME["gpu"].choices
    assert json.loads(json.dumps(fields.as_values()))[0]["fields"][0]["name"] == "model"
