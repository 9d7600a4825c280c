import errno
import fcntl
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants, hf_api
from moto import mock_aws
from safetensors.numpy import load_file, save

from estimator.errors import UserError
from estimator.models import locate, resolve
from launchers.models import pipelines, weights


def test_tiny_llama_has_the_shape_in_the_catalog(complete_model: Path) -> None:
    table, catalog_spec = resolve("tiny-llama").spec, resolve(str(complete_model)).spec
    parameters = sum(tensor.size for tensor in load_file(complete_model / "model.safetensors").values())
    assert table.parameters == catalog_spec.parameters == parameters
    assert table.max_seq_len == catalog_spec.max_seq_len


def test_each_kind_of_model_is_recognized(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder.parent / "llama-8b").mkdir()
    (folder.parent / "org" / "model").mkdir(parents=True)
    kinds = {"tiny-llama": "made", "llama-8b": "table", "./llama-8b": "folder", "model": "folder"}
    kinds |= {"org/model": "folder", "org/other": "hub", "s3://b/k": "s3"}
    assert {name: locate(name).kind for name in kinds} == kinds


def pickled(folder: Path, dtype: str = "float32") -> bytes:
    """Write the weights of a folder with torch.save."""
    import torch

    tensors = {
        name: torch.from_numpy(value).to(getattr(torch, dtype))
        for name, value in load_file(folder / "model.safetensors").items()
    }
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


def pipeline_files() -> dict[str, bytes]:
    """Return the files of a minimal pipeline; each network has one tensor."""
    tensor = {"weight": np.zeros((2, 2), dtype=np.float32)}
    files = {f"{name}/config.json": b"{}" for name in pipelines.NETWORKS}
    files |= {f"{name}/model.safetensors": save(tensor) for name in pipelines.NETWORKS}
    files |= {f"{name}/tokenizer_config.json": b"{}" for name in ("tokenizer", "tokenizer_2")}
    return files | {"scheduler/scheduler_config.json": b"{}", pipelines.INDEX: b"{}"}


# A stand-in for the hub's HTTP API: what huggingface_hub asks for, with faults on demand.

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.token: str | None = None  # needed to read, if set
        self.stall: str | None = None  # a file of which only the first half is sent
        self.stalled = threading.Event()
        self.released = threading.Event()
        self.downloads: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if "/org/model" not in path:
            return self.fail(401 if "authorization" not in self.headers else 404, "RepoNotFound")
        if self.server.token and path.startswith("/org/model/resolve"):
            authorization = self.headers.get("authorization")
            if authorization != f"Bearer {self.server.token}":
                return self.fail(403 if authorization else 401, "GatedRepo")
        files = self.server.files
        if path.startswith("/api/models/org/model/tree"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040x}"}
                for name, data in files.items()
            ]
            return self.send(json.dumps(entries).encode())
        if path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            info = {"id": "org/model", "sha": COMMIT, "siblings": siblings, "private": False}
            return self.send(json.dumps(info).encode())
        name = path.partition("/resolve/")[2].partition("/")[2]
        if name not in files:
            return self.fail(404, "EntryNotFound")
        return self.send_file(name, files[name], body)

    def send_file(self, name: str, data: bytes, body: bool) -> None:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{len(data):040x}"', "Content-Length": str(len(data))}
        if not body:
            return self.send(b"", **headers)
        self.server.downloads.append(name)
        if name != self.server.stall:
            return self.send(data, **headers)
        self.send(data[: len(data) // 2], **headers)
        self.wfile.flush()
        self.server.stalled.set()
        self.server.released.wait(60)
        self.wfile.write(data[len(data) // 2 :])
        return None

    def fail(self, status: int, code: str) -> None:
        self.send(b"", status, **{"X-Error-Code": code, "X-Error-Message": code})

    def send(self, data: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(complete_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process uses, with an empty cache and without a token."""
    files = {path.name: path.read_bytes() for path in complete_model.iterdir()}
    files |= {"consolidated.safetensors": b"x" * 99, "original/params.json": b"{}", "README.md": b"#"}
    with Hub(files) as server:
        use(server.url, tmp_path, monkeypatch)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def use(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(hf_api.api, "endpoint", url)
    values = {"ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path / "hf" / "hub"), "HF_HUB_DISABLE_XET": True}
    values |= {"HUGGINGFACE_CO_URL_TEMPLATE": f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"}
    values |= {"HF_TOKEN_PATH": str(tmp_path / "hf" / "token"), "HF_HUB_DISABLE_PROGRESS_BARS": True}
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value)
    go_offline(monkeypatch, offline=False)


def go_offline(monkeypatch: pytest.MonkeyPatch, *, offline: bool = True) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1" if offline else "")
    huggingface_hub.close_session()  # a client keeps the mode with which it was made


def fetch(tmp_path: Path, name: str = "org/model") -> Path:
    """Fetch a model; a UserError must not contain a token."""
    try:
        return weights.fetch(locate(name), tmp_path / "fetched")
    except UserError as error:
        if any(secret in str(error) for secret in ("hf_right", "hf_wrong")):
            pytest.fail("a token was printed")
        raise


def lookup(_: Path) -> None:
    """Read a model's shape from its config.json."""
    resolve("org/model", online=True)


CLIENT = """
import sys
from pathlib import Path
from estimator.models import locate
from launchers.models import weights
print(weights.fetch(locate("org/model"), Path(sys.argv[1])))
"""


def start(url: str, tmp_path: Path) -> subprocess.Popen[str]:
    """Fetch the model in a separate process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    environment |= {"HF_HUB_DISABLE_XET": "1"}  # Xet would fetch the content from another server
    command = [sys.executable, "-c", CLIENT, str(tmp_path / "fetched")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


class TestHub:
    def test_a_model_is_fetched_once_without_other_formats_of_its_weights(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.files["pytorch_model.bin"] = b"x" * 9
        assert fetch(tmp_path) == tmp_path / "fetched"
        names = {path.name for path in (tmp_path / "fetched").iterdir() if path.is_file()}
        unused = {"consolidated.safetensors", "original/params.json", "README.md", "pytorch_model.bin"}
        assert names == set(hub.files) - unused
        hub.downloads.clear()
        assert fetch(tmp_path) == tmp_path / "fetched"
        go_offline(monkeypatch)
        assert fetch(tmp_path) == tmp_path / "fetched"
        assert hub.downloads == []

    def test_a_model_without_safetensors_is_converted_once_and_the_downloaded_files_are_deleted(
        self, hub: Hub, complete_model: Path, tmp_path: Path
    ) -> None:
        hub.files |= {
            "pytorch_model.bin": pickled(complete_model),
            "pytorch_model.fp16.bin": b"x",
            "flax.msgpack": b"x",
        }
        del hub.files["model.safetensors"], hub.files["consolidated.safetensors"]
        assert fetch(tmp_path) == tmp_path / "fetched"
        assert "pytorch_model.bin" in hub.downloads
        assert not {"pytorch_model.fp16.bin", "flax.msgpack"} & set(hub.downloads)
        loaded, loaded_tensors = (
            load_file(folder / "model.safetensors") for folder in (tmp_path / "fetched", complete_model)
        )
        assert loaded.keys() == loaded_tensors.keys()
        assert all(np.array_equal(loaded[name], loaded_tensors[name]) for name in loaded_tensors)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("fetched")] == ["fetched"]
        assert list((tmp_path / "fetched").glob("*.bin")) == []
        hub.downloads.clear()
        assert fetch(tmp_path) == tmp_path / "fetched"
        assert hub.downloads == []

    def test_a_model_without_any_weights_is_refused_before_the_download(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        del hub.files["model.safetensors"]
        with pytest.raises(UserError, match=r"neither \*\.safetensors nor pytorch_model\*\.bin"):
            fetch(tmp_path)
        assert hub.downloads == []

    def test_the_folders_of_a_pipeline_are_fetched_once_without_other_formats(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        files_of_pipeline = pipeline_files()
        hub.files = files_of_pipeline | {
            "README.md": b"x",
            "whole.safetensors": b"x" * 9,
            "unet/diffusion_pytorch_model.fp16.safetensors": b"x" * 9,
            "text_encoder/flax_model.msgpack": b"x",
            "vae_decoder/model.onnx": b"x",
        }
        folder = fetch(tmp_path)
        names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        assert set(files_of_pipeline) <= names
        assert not {"whole.safetensors", "vae_decoder/model.onnx"} & names
        assert not any("fp16" in name or "flax" in name for name in names)
        hub.downloads.clear()
        assert fetch(tmp_path) == folder
        assert hub.downloads == []

    def test_the_shape_of_a_model_is_read_from_config_json_alone(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = resolve("tiny-llama").spec.parameters
        assert resolve("org/model", online=True).spec.parameters == expected
        assert hub.downloads == ["config.json"]
        go_offline(monkeypatch)
        assert resolve("org/model", online=True).spec.parameters == expected

    def test_a_gated_model_needs_a_token_from_the_environment_with_access(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hub.token = "hf_right"
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "token").write_text("hf_right")  # a login's file is not used
        for use_hub in (fetch, lookup):
            with pytest.raises(UserError) as refused:
                use_hub(tmp_path)
            assert refused.value.problem == "HF_TOKEN: model org/model is gated and no token is set."
            assert "https://huggingface.co/org/model" in refused.value.advice
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(UserError, match="HF_TOKEN: this token may not read model org/model"):
            fetch(tmp_path)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        assert fetch(tmp_path) == tmp_path / "fetched"

    @pytest.mark.parametrize("token", ["", "hf_right"])
    @pytest.mark.usefixtures("hub")
    def test_a_model_that_does_not_exist_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(UserError, match=r"org/none is not on the Hugging Face Hub, or is private"):
            fetch(tmp_path, "org/none")

    def test_a_missing_network_is_named_as_the_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use("http://127.0.0.1:9", tmp_path, monkeypatch)
        for use_hub in (fetch, lookup):
            with pytest.raises(UserError, match="the Hugging Face Hub cannot be reached"):
                use_hub(tmp_path)
        go_offline(monkeypatch)
        for use_hub in (fetch, lookup):
            with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
                use_hub(tmp_path)

    def test_a_disk_that_is_too_small_is_named_before_the_download(
        self, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1_000_000))
        with pytest.raises(UserError, match=r"needs \d+ MiB, .*/fetched has \d+ MiB free"):
            fetch(tmp_path)
        assert hub.downloads == []

    def test_a_killed_download_resumes_at_the_file_where_it_stopped(
        self, hub: Hub, sharded: Path, tmp_path: Path
    ) -> None:
        hub.files = {path.name: path.read_bytes() for path in sharded.iterdir()}
        hub.stall = "model-00002-of-00002.safetensors"
        process = start(hub.url, tmp_path)
        assert hub.stalled.wait(60)
        first = "model-00001-of-00002.safetensors"
        wait_for(tmp_path / "fetched" / first)
        wait_for(tmp_path / "fetched/.cache/huggingface/download" / f"{first}.metadata")
        process.kill()
        process.communicate()
        hub.stall = None
        hub.released.set()
        hub.downloads.clear()
        assert fetch(tmp_path) == tmp_path / "fetched"
        assert [name for name in hub.downloads if name.endswith(".safetensors")] == [
            "model-00002-of-00002.safetensors"
        ]
        for name, data in hub.files.items():
            assert (tmp_path / "fetched" / name).read_bytes() == data
        assert list((tmp_path / "fetched").rglob("*.incomplete")) == []

    def test_only_one_of_two_processes_that_share_a_folder_downloads(
        self, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hub.stall = "model.safetensors"
        process = start(hub.url, tmp_path)
        assert hub.stalled.wait(60)
        waiting = threading.Thread(target=fetch, args=(tmp_path,))
        waiting.start()
        while "waiting for another process that fetches into" not in capsys.readouterr().err:
            time.sleep(0.05)
        hub.released.set()
        waiting.join()
        assert process.communicate(timeout=120)[0] == f"{tmp_path / 'fetched'}\n"
        assert len(hub.downloads) == len(set(hub.downloads))


def test_waiting_for_another_process_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "FETCH_LIMIT_S", 0.5)
    with (
        weights._exclusive(tmp_path / "model"),
        pytest.raises(UserError, match="Another process has been fetching into"),
        weights._exclusive(tmp_path / "model"),
    ):
        pass


def test_a_file_system_without_locks_does_not_prevent_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with weights._exclusive(tmp_path / "model"):
        pass


def wait_for(path: Path) -> None:
    """Wait until the file has content."""
    deadline = time.monotonic() + 30
    while not (path.is_file() and path.stat().st_size):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


class TestS3:
    @pytest.fixture
    def bucket(self, complete_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        for name, value in {"ACCESS_KEY_ID": "testing", "SECRET_ACCESS_KEY": "testing"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with mock_aws():
            client = boto3.client("s3")
            client.create_bucket(Bucket="models")
            for path in complete_model.iterdir():
                client.upload_file(str(path), "models", f"tiny/{path.name}")
            client.put_object(Bucket="models", Key="tiny/optimizer.pt", Body=b"x")
            client.put_object(Bucket="models", Key="tiny/old/model.safetensors", Body=b"x")
            yield client

    @pytest.mark.usefixtures("bucket")
    def test_a_model_in_object_storage_is_downloaded_completely_and_once(
        self, complete_model: Path, tmp_path: Path
    ) -> None:
        ref = locate("s3://models/tiny")
        assert resolve("s3://models/tiny/").spec.hidden == 256
        path = weights.fetch(ref, tmp_path / "m")
        assert {p.name: p.read_bytes() for p in path.iterdir()} == {
            p.name: p.read_bytes() for p in complete_model.iterdir()
        }
        times = {p: p.stat().st_mtime_ns for p in path.iterdir()}
        os.truncate(path / "tokenizer.json", 5)
        weights.fetch(ref, tmp_path / "m")
        downloaded_again = [p.name for p in path.iterdir() if p.stat().st_mtime_ns != times[p]]
        assert downloaded_again == ["tokenizer.json"]

    def test_a_model_without_safetensors_is_converted_when_its_files_have_changed(
        self, bucket: Any, complete_model: Path, tmp_path: Path
    ) -> None:
        bucket.delete_object(Bucket="models", Key="tiny/model.safetensors")
        bucket.put_object(Bucket="models", Key="tiny/pytorch_model.bin", Body=pickled(complete_model))
        ref, weights_file = locate("s3://models/tiny"), tmp_path / "m" / "model.safetensors"
        assert weights.fetch(ref, tmp_path / "m") == tmp_path / "m"
        assert load_file(weights_file).keys() == load_file(complete_model / "model.safetensors").keys()
        assert not (tmp_path / "m-bin").exists()
        made_at = weights_file.stat().st_mtime_ns
        weights.fetch(ref, tmp_path / "m")
        assert weights_file.stat().st_mtime_ns == made_at
        bucket.put_object(
            Bucket="models", Key="tiny/pytorch_model.bin", Body=pickled(complete_model, "float64")
        )
        weights.fetch(ref, tmp_path / "m")
        assert weights_file.stat().st_mtime_ns > made_at

    @pytest.mark.parametrize(
        ("url", "output"), [("s3://models/none", "no model"), ("s3://nowhere/tiny", "no such bucket")]
    )
    @pytest.mark.usefixtures("bucket")
    def test_missing_files_are_named(self, tmp_path: Path, url: str, output: str) -> None:
        with pytest.raises(UserError, match=f"{url}.*{output}"):
            weights.fetch(locate(url), tmp_path / "m")

    def test_a_full_disk_leaves_no_partial_weights_file(
        self, bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: Any, bucket: str, key: str, name: str) -> None:
            Path(name).write_bytes(b"half")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(type(bucket), "download_file", fail, raising=False)
        monkeypatch.setattr("estimator.remote.s3_client", lambda: bucket)
        with pytest.raises(UserError, match="No space left"):
            weights.fetch(locate("s3://models/tiny"), tmp_path / "m")
        assert list((tmp_path / "m").iterdir()) == []


def test_a_local_model_is_checked_and_used_in_place(
    complete_model: Path, folder: Path, tmp_path: Path
) -> None:
    assert weights.fetch(locate(str(complete_model)), tmp_path / "unused") == complete_model.resolve()
    assert not (tmp_path / "unused").exists()
    np.zeros(3).tofile(folder / "model.safetensors")
    with pytest.raises(UserError):
        weights.fetch(locate(str(folder)), tmp_path / "unused")


def test_planning_needs_no_package_of_the_engines() -> None:
    code = """
import sys
for name in ("numpy", "torch", "transformers", "huggingface_hub", "httpx2", "boto3", "datasets"):
    sys.modules[name] = None
from estimator.errors import UserError
from estimator import models
from launchers.models import weights
from launchers.dataset import rows, sources
print(models.resolve("llama-8b").spec.hf_id)
for use in (
    lambda: models.resolve("org/model", online=True),
    lambda: models.resolve("s3://bucket/model"),
    lambda: sources.fetch("org/data", None),
):
    try:
        use()
    except UserError as error:
        print(error.advice)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert lines[0].startswith("meta-llama/")
    assert [line.startswith("pip install 'metaflow-finetune[") for line in lines[1:]] == [True] * 3
