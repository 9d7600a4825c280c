"""``finetune gpus``: what a wish leaves, and each form of the answer."""

from __future__ import annotations

import json
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from estimator import hardware
from estimator.cli.gpus import gpus
from estimator.errors import UserError
from estimator.hardware.cluster import inventory
from estimator.hardware.cluster.inventory import ClusterState
from estimator.hardware.cluster.nodes import Node
from estimator.hardware.prices import refresh as refreshing
from estimator.hardware.prices.cache import ProviderAnswer

APP = typer.Typer()
APP.command()(gpus)


@pytest.fixture(autouse=True)
def _isolated_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FINETUNE_HARDWARE", raising=False)
    hardware.clear_cache()


def run(*words: str) -> Result:
    return CliRunner().invoke(APP, words)


def answer(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.exception
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def names(records: list[dict[str, Any]]) -> list[str]:
    return [record["name"] for record in records]


def refusal(*words: str) -> UserError:
    result = run(*words)
    assert isinstance(result.exception, UserError)
    return result.exception


def test_without_options_all_gpus_and_instance_types_are_listed() -> None:
    record = answer()
    assert names(record["gpus"]) == [gpu.name for gpu in hardware.gpus()]
    assert len(record["instances"]) == len(hardware.instances())
    assert record["cluster"] is None


def test_min_vram_24_matches_cards_marketed_as_24_gb_and_shows_their_reported_size() -> None:
    record = answer("--min-vram", "24")
    found = {gpu["name"]: gpu for gpu in record["gpus"]}
    assert {"L4", "A10G", "RTX 4090", "RTX 3090", "H200 SXM"} <= found.keys()
    assert "T4" not in found
    assert (found["L4"]["vram_gib"], found["L4"]["vram_bytes"], found["L4"]["label_gb"]) == (
        22.494,
        23034 * 2**20,
        24,
    )
    assert found["L4"]["usable_bytes"] == int(22.05 * 2**30)
    assert all(item["gpu_count"] > 0 for item in record["instances"])  # a share of a card has less


def test_architecture_cloud_and_size_filters_combine() -> None:
    record = answer("--min-vram", "24", "--arch", "hopper", "--cloud", "aws")
    assert names(record["gpus"]) == ["H200 SXM", "H100 SXM"]
    assert names(record["instances"]) == ["p5en.48xlarge", "p5e.48xlarge", "p5.4xlarge", "p5.48xlarge"]


def test_a_gpu_name_prefix_matches_several_gpus() -> None:
    assert names(answer("--gpu", "a100")["gpus"]) == [
        "A100 SXM 80GB",
        "A100 SXM 40GB",
        "A100 PCIe 80GB",
        "A100 PCIe 40GB",
    ]
    assert names(answer("--gpu", "Tesla T4")["gpus"]) == ["T4"]


def test_a_price_limit_keeps_priced_instance_types_sorted_by_price() -> None:
    record = answer("--gpu", "l4", "--max-price", "1")
    prices = [item["on_demand_usd_per_hour"] for item in record["instances"]]
    assert prices == sorted(prices)
    assert max(prices) <= 1
    assert names(answer("--max-price", "0.6", "--spot")["gpus"]) == ["L4"]


def test_each_price_has_region_date_age_and_source() -> None:
    (item,) = (item for item in answer("--gpu", "h100")["instances"] if item["name"] == "p5.48xlarge")
    assert item["on_demand_usd_per_hour"] == 55.04
    assert (item["price_region"], item["price_date"]) == ("us-east-1", "2026-07-20")
    assert item["price_age_days"] == (date.today() - date(2026, 7, 20)).days
    assert "AWS price list" in item["price_source"]
    (unpriced,) = (item for item in answer("--gpu", "h200")["instances"] if item["name"] == "p5e.48xlarge")
    assert unpriced["on_demand_usd_per_hour"] is None
    assert unpriced["price_age_days"] is None


def test_the_table_shows_the_values_of_the_json() -> None:
    text = run("--gpu", "l4").stdout
    for words in ("22.0 GiB of 23,034 MiB", f"{(date.today() - date(2026, 7, 20)).days} days", "g6.xlarge"):
        assert words in text
    assert "g6.xlarge" not in run("--gpu", "l4", "--no-instances").stdout
    assert "22.4 GiB (22,888 MiB)" in run("--gpu", "a10g").stdout
    assert "22.4 GiB (label: 24 GB)" in run("--gpu", "a30").stdout
    assert "No GPU matches these options." in run("--min-vram", "5000").stdout


def test_unknown_values_are_question_marks_in_tables_and_null_in_json() -> None:
    assert answer("--gpu", "a5000")["gpus"][0]["bf16_tflops_dense"] is None
    shown = run("--gpu", "a5000", "--no-instances").stdout
    (line,) = (line for line in shown.splitlines() if "A5000" in line)
    assert " ? " in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--min-vram", "0"), "--min-vram 0"),
        (("--min-vram", "nan"), "--min-vram nan"),
        (("--max-price", "-1"), "--max-price -1: a price cannot be negative"),
        (("--json", "--csv"), "--json and --csv"),
        (("--context", "a"), "--context needs --from-cluster"),
    ],
)
def test_impossible_options_give_one_clear_line(words: tuple[str, ...], says: str) -> None:
    assert says in refusal(*words).problem


def test_the_csv_output_can_be_edited_and_passed_to_hardware(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(run("--csv").stdout)
    made, table = hardware.catalogue(file), hardware.catalogue()
    assert (made.gpus, made.instances) == (table.gpus, table.instances)


def test_gpus_of_a_hardware_file_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("instance_type,on_demand_usd_h\np5.48xlarge,31.5\n")
    record = answer("--gpu", "h100", "--hardware", str(file))
    (item,) = (item for item in record["instances"] if item["name"] == "p5.48xlarge")
    assert (item["on_demand_usd_per_hour"], item["price_source"]) == (31.5, str(file))
    assert "cannot be read" in refusal("--hardware", str(tmp_path / "none.csv")).problem


def test_machines_without_prices_have_no_list_of_price_sources(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("cloud,instance_type,gpu,gpu_count\nonprem,rack-7,L4,4\n")
    printed = run("--hardware", str(file), "--cloud", "onprem").stdout
    assert "rack-7" in printed
    assert "Sources" not in printed
    assert "Sources" in run("--gpu", "L4").stdout


def test_refreshed_prices_are_shown_and_each_provider_reports_on_stderr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    day = date.today() - timedelta(days=2)
    cells = {
        "cloud": "aws",
        "instance_type": "g6.xlarge",
        "on_demand_usd_h": "0.7",
        "price_date": str(day),
        "price_region": "us-east-1",
        "price_source": "API",
    }
    fine = ProviderAnswer(line="1 on-demand prices", machines={"g6.xlarge": cells})
    off = ProviderAnswer(line="not queried: there are no credentials")
    monkeypatch.setattr(refreshing, "PROVIDERS", (("one", lambda *_: fine), ("two", lambda *_: off)))
    result = run("--gpu", "l4", "--cloud", "aws", "--refresh", "--json")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "one: 1 on-demand prices",
        "two: not queried: there are no credentials",
    ]
    record = json.loads(result.stdout)
    assert record["refreshed"] == result.stderr.splitlines()
    item = next(item for item in record["instances"] if item["name"] == "g6.xlarge")
    assert (item["on_demand_usd_per_hour"], item["price_age_days"], item["price_source"]) == (0.7, 2, "API")


def test_with_from_cluster_nodes_are_listed_instead_of_instance_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def node(name: str, **labels: str) -> Node:
        resources = {"cpu": 191.45, "memory": 2.0e12, "ephemeral-storage": 9.5e10, "nvidia.com/gpu": 8.0}
        own = {
            "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3",
            "node.kubernetes.io/instance-type": "p5.48xlarge",
        }
        return Node(
            name=name,
            labels=own | {key.replace("_", "/"): value for key, value in labels.items()},
            allocatable=resources,
            capacity=resources,
            ready=True,
            unschedulable=False,
            taints=(),
            cloud=None,
        )

    nodes = [node("a"), node("b"), node("c", **{"nvidia.com_gpu.replicas": "4"})]
    monkeypatch.setattr(
        inventory, "fetch", lambda context, _: ClusterState(context=context or "current", nodes=tuple(nodes))
    )
    record = answer("--from-cluster", "--context", "training")
    assert (names(record["gpus"]), names(record["instances"])) == (["H100 SXM"], ["p5.48xlarge"])
    assert record["cluster"]["context"] == "training"
    (group,) = record["cluster"]["nodes"]
    assert (group["count"], group["allocatable_gpus"], group["allocatable_cpu_cores"]) == (2, 8, 191.45)
    (aside,) = record["cluster"]["skipped"]
    assert aside["names"] == ["c"]
    text = run("--from-cluster").stdout
    assert "Skipped, GPUs are shared" in text
    assert "8x H100 SXM" in text
