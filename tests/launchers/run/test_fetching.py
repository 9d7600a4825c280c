"""finetune fetch: the settings that it writes need no network, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto import mock_aws
from typer.testing import CliRunner

from estimator import Target
from estimator.cli.app import app
from estimator.job import Machine
from estimator.plan import GIB
from launchers import settings
from launchers.models import tiny_llama
from launchers.run import preparation

HERE = Target(kind="local", machine=Machine(cpu_cores=4, ram_bytes=16 * GIB, disk_free_bytes=100 * GIB))
ROW = {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}


def fetch(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["fetch", *arguments], prog_name="finetune")
    return done.exit_code, done.output


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an S3 folder with a model and 40 rows."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with mock_aws():
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="data")
        for path in tiny_llama.make(tmp_path / "original").iterdir():
            s3.put_object(Bucket="data", Key=f"mine/model/{path.name}", Body=path.read_bytes())
        s3.put_object(Bucket="data", Key="mine/rows.jsonl", Body=(json.dumps(ROW) + "\n") * 40)
        yield "s3://data/mine"


@pytest.mark.slow
def test_the_settings_of_fetched_inputs_need_no_network(bucket: str, tmp_path: Path) -> None:
    settings_file = tmp_path / "run.yaml"
    settings_file.write_text(f"model: {bucket}/model\ndataset: {bucket}/rows.jsonl\nseq_len: 64\n")
    status, output = fetch(str(settings_file), "--output", str(tmp_path / "fetched"), "--set", "epochs=2")
    assert status == 0, output
    assert f"{bucket}/rows.jsonl: 40 rows" in output

    boto3.client("s3").delete_objects(
        Bucket="data",
        Delete={"Objects": [{"Key": "mine/rows.jsonl"}, {"Key": "mine/model/config.json"}]},
    )
    written = settings.build(settings.read_file(tmp_path / "fetched" / "settings.yaml"))
    assert (written.seq_len, written.epochs) == (64, 2)
    assert Path(written.model).is_relative_to(tmp_path / "fetched")
    planned = preparation.plan_run(written, HERE, calibrated=False)
    rows, _ = preparation.read_data(planned.settings, tmp_path / "run")
    model_dir = preparation.fetch_weights(planned.model, tmp_path / "run" / "weights")
    info = preparation.tokenize(rows, None, planned.settings, model_dir, tmp_path / "run" / "data")
    assert info.total_steps > 0


@pytest.mark.parametrize("place", ["file", "file/fetched"])
def test_an_impossible_output_folder_is_refused_before_anything_is_fetched(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    status, output = fetch("--output", place)
    assert status == 2
    assert output.startswith(f"Cannot create {place}: ")
    assert "all well-formed" not in output


@pytest.mark.slow
def test_malformed_rows_are_refused_when_they_are_fetched(bucket: str, tmp_path: Path) -> None:
    boto3.client("s3").put_object(Bucket="data", Key="mine/rows.jsonl", Body='{"messages": []}\n')
    status, output = fetch("--dataset", f"{bucket}/rows.jsonl", "--output", str(tmp_path / "fetched"))
    assert status == 2
    assert "line 1" in output
    assert not (tmp_path / "fetched" / "settings.yaml").exists()


def test_models_and_datasets_of_the_hub_are_refused_by_name_if_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, output = fetch("-m", "llama-8b", "--dataset", "org/rows", "-o", str(tmp_path / "fetched"))
    assert status == 2
    assert "HF_HUB_OFFLINE is set, so llama-8b, org/rows cannot be fetched." in output
    status, output = fetch("-o", str(tmp_path / "fetched"))
    assert (status, "settings.yaml" in output) == (0, True), "generated inputs need no network"
