"""``finetune serve --with kubernetes`` for a run whose model is in an S3 datastore."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from decorators import _metaflow, finished_models
from flows.commands import serve
from launchers.inference import finished
from launchers.inference.finished import FinishedModel
from launchers.models import tiny_llama
from launchers.store.bundles import put_bundle
from tests.decorators.test_storage import _s3_storage
from tests.decorators.test_storage import s3 as s3

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}


class S3Kind:
    """The S3 datastore of Metaflow."""

    TYPE = "s3"
    datastore_root = "s3://bucket/some/root"


@pytest.fixture
def stored(s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FinishedModel:
    """The model of run 17, in a local folder and in S3."""
    monkeypatch.setattr(_metaflow, "configured_storage", S3Kind)
    _s3_storage(s3, monkeypatch)
    model = tiny_llama.make(tmp_path / "run" / "model", config={**tiny_llama.CONFIG, "num_hidden_layers": 1})
    store = finished_models.MetaflowStorage(S3Kind(), "FinetuneFlow/finetune")
    put_bundle(store, "models/17", tmp_path / "run")
    return FinishedModel(name="tiny-finetuned", folder=model, base="tiny", run="FinetuneFlow/17", gpu="L4")


def test_an_init_container_fetches_the_model_of_the_run(
    stored: FinishedModel,
    s3: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serve, "find", lambda _: stored)
    serve.serve("17", with_="kubernetes")
    deployment, _ = yaml.safe_load_all(capsys.readouterr().out)
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"][:2] == ["serve", "/model/model"]
    (fetch,) = pod["initContainers"]
    python, *words, folder = fetch["command"]
    assert (python, folder) == ("python3", "/model")
    assert fetch["volumeMounts"][0]["name"] in [each["name"] for each in pod["volumes"]]
    done = _run(words, tmp_path / "pod", s3)
    assert done.returncode == 0, done.stderr
    fetched = {path.name: path.read_bytes() for path in (tmp_path / "pod" / "model").iterdir()}
    assert fetched == {path.name: path.read_bytes() for path in stored.folder.iterdir()}


def test_a_damaged_model_ends_the_init_container_with_one_line(
    stored: FinishedModel, s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client: Any = _metaflow.s3_client()[0]
    prefix = "some/root/FinetuneFlow/finetune/models/17/"
    keys = [each["Key"] for each in client.list_objects_v2(Bucket="bucket", Prefix=prefix)["Contents"]]
    damaged = next(key for key in keys if key.endswith("-config.json"))
    client.put_object(Bucket="bucket", Key=damaged, Body=b"{}")
    source = (Path(finished.__file__).with_name("fetch_in_pod.py")).read_text()
    stored_model = finished_models.stored_in_s3(stored)
    assert stored_model is not None
    done = _run(["-c", source, stored_model.address], tmp_path / "pod", s3)
    assert done.returncode == 1
    assert "config.json has changed since it was stored" in done.stderr
    assert "Traceback" not in done.stderr


def _run(arguments: list[str], folder: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    """Run the init container's command for another folder, without this package."""
    environment = {"PATH": os.environ["PATH"], **CREDENTIALS, "AWS_ENDPOINT_URL_S3": endpoint}
    return subprocess.run(
        [sys.executable, *arguments, str(folder)],
        env=environment,
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
