import errno
import fcntl
import io
import json
import os
import re
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
import numpy as np
import pytest
from moto import mock_aws
from safetensors.numpy import load_file, save

from estimator.errors import UserError
from estimator.models import locate, resolve
from launchers.models import pipelines, weights


class TestResolve:
    def test_names_of_the_table_need_neither_network_nor_disk(self) -> None:
        model = resolve("llama-8b")
        assert model.kind == "table"
        assert model.spec.hf_id == model.location
        assert model.spec.parameters == pytest.approx(8.03e9, rel=0.01)

    def test_tiny_llama_has_the_shape_that_the_table_says(self, whole: Path) -> None:
        table = resolve("tiny-llama").spec
        made = resolve(str(whole)).spec
        weights_in_file = sum(tensor.size for tensor in load_file(whole / "model.safetensors").values())
        assert table.parameters == made.parameters == weights_in_file
        assert table.max_seq_len == made.max_seq_len

    def test_each_kind_is_told_apart(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folder.parent)
        (folder.parent / "llama-8b").mkdir()
        (folder.parent / "org" / "model").mkdir(parents=True)
        kinds = {
            name: locate(name).kind
            for name in (
                "tiny-llama",
                "llama-8b",
                "./llama-8b",
                "model",
                "org/model",
                "org/other",
                "s3://b/k",
            )
        }
        assert kinds == {
            "tiny-llama": "made",
            "llama-8b": "table",
            "./llama-8b": "folder",
            "model": "folder",
            "org/model": "folder",
            "org/other": "hub",
            "s3://b/k": "s3",
        }

    def test_an_unknown_name_is_answered_with_the_nearest(self) -> None:
        with pytest.raises(UserError) as error:
            locate("lama-8b")
        assert "llama-8b" in error.value.advice

    @pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "s3://bucket"])
    def test_what_is_nowhere_is_named(self, name: str) -> None:
        with pytest.raises(UserError, match=re.escape(name.removeprefix("./"))):
            locate(name)


def pickled(folder: Path, dtype: str = "float32") -> bytes:
    """The weights of a folder as torch.save writes them."""
    import torch

    tensors = {
        name: torch.from_numpy(value).to(getattr(torch, dtype))
        for name, value in load_file(folder / "model.safetensors").items()
    }
    file = io.BytesIO()
    torch.save(tensors, file)
    return file.getvalue()


def pipeline_files() -> dict[str, bytes]:
    """The files of a pipeline as small as its layout allows: each network has one tensor."""
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
        self.stall: str | None = None  # a file of which only the first half comes
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
            given = self.headers.get("authorization")
            if given != f"Bearer {self.server.token}":
                return self.fail(403 if given else 401, "GatedRepo")
        files = self.server.files
        if path.startswith("/api/models/org/model/tree"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040x}"}
                for name, data in files.items()
            ]
            return self.send_json(entries)
        if path.startswith("/api/models/org/model"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            return self.send_json({"id": "org/model", "sha": COMMIT, "siblings": siblings, "private": False})
        name = path.partition("/resolve/")[2].partition("/")[2]
        if name not in files:
            return self.fail(404, "EntryNotFound")
        return self.send_file(name, files[name], body)

    def send_json(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_file(self, name: str, data: bytes, body: bool) -> None:
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{len(data):040x}"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        self.server.downloads.append(name)
        if name == self.server.stall:
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            self.server.released.wait(60)
            data = data[len(data) // 2 :]
        self.wfile.write(data)

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub(whole: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in whole.iterdir()}
    files |= {"consolidated.safetensors": b"x" * 99, "original/params.json": b"{}", "README.md": b"#"}
    with Hub(files) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


CLIENT = """
import json, shutil, sys
from pathlib import Path
from estimator import models
from estimator.errors import UserError
from launchers.models import weights
command, name, folder, free = sys.argv[1:]
if free:
    real = shutil.disk_usage
    shutil.disk_usage = lambda path: real(path)._replace(free=int(free))
try:
    if command == "fetch":
        print(json.dumps({"path": str(weights.fetch(models.locate(name), Path(folder)))}))
    else:
        print(json.dumps({"parameters": models.resolve(name, online=True).spec.parameters}))
except UserError as error:
    print(json.dumps({"problem": error.problem, "advice": error.advice}))
"""


def start(
    url: str, tmp_path: Path, command: str = "fetch", name: str = "org/model", free: str = "", **environ: str
) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    # Xet would go to another server for the content.
    environment |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **environ}
    arguments = [sys.executable, "-c", CLIENT, command, name, str(tmp_path / "fetched"), free]
    return subprocess.Popen(
        arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(url: str, tmp_path: Path, **options: str) -> dict[str, Any]:
    with start(url, tmp_path, **options) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert not any(secret in output + errors for secret in ("hf_right", "hf_wrong")), "a token was printed"
    return dict(json.loads(output.splitlines()[-1]))


class TestHub:
    def test_a_model_is_fetched_whole_without_other_formats_and_once(self, hub: Hub, tmp_path: Path) -> None:
        answer = run(hub.url, tmp_path)
        assert answer == {"path": str(tmp_path / "fetched")}
        names = {path.name for path in (tmp_path / "fetched").iterdir() if path.is_file()}
        assert names == set(hub.files) - {"consolidated.safetensors", "original/params.json", "README.md"}
        hub.downloads.clear()
        assert run(hub.url, tmp_path) == answer
        assert run(hub.url, tmp_path, HF_HUB_OFFLINE="1") == answer
        assert hub.downloads == []

    def test_a_model_without_safetensors_is_converted_once_and_its_own_files_go(
        self, hub: Hub, whole: Path, tmp_path: Path
    ) -> None:
        hub.files |= {
            "pytorch_model.bin": pickled(whole),
            "pytorch_model.fp16.bin": b"x",
            "flax.msgpack": b"x",
        }
        del hub.files["model.safetensors"], hub.files["consolidated.safetensors"]
        answer = run(hub.url, tmp_path)
        assert answer == {"path": str(tmp_path / "fetched")}
        assert "pytorch_model.bin" in hub.downloads
        assert not {"pytorch_model.fp16.bin", "flax.msgpack"} & set(hub.downloads)
        made, given = (load_file(folder / "model.safetensors") for folder in (tmp_path / "fetched", whole))
        assert made.keys() == given.keys()
        assert all(np.array_equal(made[name], given[name]) for name in given)
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("fetched")] == ["fetched"]
        assert list((tmp_path / "fetched").glob("*.bin")) == []
        hub.downloads.clear()
        assert run(hub.url, tmp_path) == answer
        assert hub.downloads == []

    def test_pickles_beside_safetensors_are_not_fetched(self, hub: Hub, tmp_path: Path) -> None:
        hub.files["pytorch_model.bin"] = b"x" * 9
        run(hub.url, tmp_path)
        assert "model.safetensors" in hub.downloads
        assert "pytorch_model.bin" not in hub.downloads

    def test_a_model_without_any_weights_is_refused_before_the_download(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        del hub.files["model.safetensors"]
        answer = run(hub.url, tmp_path)
        assert "neither *.safetensors nor pytorch_model*.bin" in answer["problem"]
        assert hub.downloads == []

    def test_a_pipeline_s_folders_are_fetched_without_their_other_forms(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        made = pipeline_files()
        hub.files = made | {
            "README.md": b"x",
            "whole.safetensors": b"x" * 9,
            "unet/diffusion_pytorch_model.fp16.safetensors": b"x" * 9,
            "text_encoder/flax_model.msgpack": b"x",
            "vae_decoder/model.onnx": b"x",
        }
        answer = run(hub.url, tmp_path)
        assert answer == {"path": str(tmp_path / "fetched")}
        names = {str(path.relative_to(tmp_path / "fetched")) for path in (tmp_path / "fetched").rglob("*")}
        assert set(made) <= names
        assert not {"whole.safetensors", "vae_decoder/model.onnx"} & names
        assert not any("fp16" in name or "flax" in name for name in names)
        hub.downloads.clear()
        assert run(hub.url, tmp_path) == answer
        assert hub.downloads == []

    def test_the_shape_comes_from_config_json_alone(self, hub: Hub, tmp_path: Path) -> None:
        assert run(hub.url, tmp_path, command="spec")["parameters"] == resolve("tiny-llama").spec.parameters
        assert hub.downloads == ["config.json"]
        assert "parameters" in run(hub.url, tmp_path, command="spec", HF_HUB_OFFLINE="1")

    def test_a_gated_model_without_a_token_asks_for_hf_token(self, hub: Hub, tmp_path: Path) -> None:
        hub.token = "hf_right"
        for command in ("fetch", "spec"):
            answer = run(hub.url, tmp_path, command=command)
            assert answer["problem"] == "HF_TOKEN: model org/model is gated and no token is set."
            assert "HF_TOKEN" in answer["advice"]
            assert "https://huggingface.co/org/model" in answer["advice"]

    def test_a_gated_model_refuses_a_token_without_access_and_takes_the_right_one(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        hub.token = "hf_right"
        answer = run(hub.url, tmp_path, HF_TOKEN="hf_wrong")
        assert answer["problem"].startswith("HF_TOKEN: this token may not read model org/model")
        assert "path" in run(hub.url, tmp_path, HF_TOKEN="hf_right")

    def test_a_token_comes_from_the_environment_alone(self, hub: Hub, tmp_path: Path) -> None:
        hub.token = "hf_right"
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "token").write_text("hf_right")
        assert run(hub.url, tmp_path)["problem"].endswith("no token is set.")

    @pytest.mark.parametrize("token", ["", "hf_right"])
    def test_a_model_that_is_not_there_is_named(self, hub: Hub, tmp_path: Path, token: str) -> None:
        answer = run(hub.url, tmp_path, name="org/none", HF_TOKEN=token)
        assert "org/none is not on the Hugging Face Hub, or is private" in answer["problem"]

    def test_without_a_network_one_line_says_so(self, tmp_path: Path) -> None:
        for command in ("fetch", "spec"):
            answer = run("http://127.0.0.1:9", tmp_path, command=command)
            assert "the Hugging Face Hub cannot be reached" in answer["problem"]
            answer = run("http://127.0.0.1:9", tmp_path, command=command, HF_HUB_OFFLINE="1")
            assert "HF_HUB_OFFLINE is set" in answer["problem"]

    def test_too_little_space_stops_it_before_the_download(self, hub: Hub, tmp_path: Path) -> None:
        answer = run(hub.url, tmp_path, free="1000000")
        assert re.search(r"needs \d+ MiB, .*/fetched has \d+ MiB free", answer["problem"])
        assert hub.downloads == []

    def test_a_download_that_was_killed_goes_on_with_the_file_where_it_stopped(
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
        assert run(hub.url, tmp_path) == {"path": str(tmp_path / "fetched")}
        assert [name for name in hub.downloads if name.endswith(".safetensors")] == [
            "model-00002-of-00002.safetensors"
        ]
        for name, data in hub.files.items():
            assert (tmp_path / "fetched" / name).read_bytes() == data
        assert list((tmp_path / "fetched").rglob("*.incomplete")) == []

    def test_of_two_processes_that_fetch_into_one_folder_one_downloads(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        hub.stall = "model.safetensors"
        processes = [start(hub.url, tmp_path)]
        assert hub.stalled.wait(60)
        processes.append(start(hub.url, tmp_path))
        time.sleep(2)  # long enough for the second to begin a download of its own, if it did not wait
        hub.released.set()
        answers = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
        assert answers == [{"path": str(tmp_path / "fetched")}] * 2
        assert len(hub.downloads) == len(set(hub.downloads))


def test_waiting_for_another_process_is_said_and_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(weights, "FETCH_LIMIT_S", 0.5)
    with (
        weights._exclusive(tmp_path / "model"),
        pytest.raises(UserError, match="Another process has been fetching into"),
        weights._exclusive(tmp_path / "model"),
    ):
        pass
    assert f"waiting for another process that fetches into {tmp_path / 'model'}" in capsys.readouterr().err


def test_a_file_system_without_locks_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with weights._exclusive(tmp_path / "model"):
        pass


def wait_for(path: Path) -> None:
    """Until the file is there and has something in it."""
    deadline = time.monotonic() + 30
    while not (path.is_file() and path.stat().st_size):
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


class TestS3:
    @pytest.fixture
    def bucket(self, whole: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        for name, value in {"ACCESS_KEY_ID": "testing", "SECRET_ACCESS_KEY": "testing"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with mock_aws():
            client = boto3.client("s3")
            client.create_bucket(Bucket="models")
            for path in whole.iterdir():
                client.upload_file(str(path), "models", f"tiny/{path.name}")
            client.put_object(Bucket="models", Key="tiny/optimizer.pt", Body=b"x")
            client.put_object(Bucket="models", Key="tiny/old/model.safetensors", Body=b"x")
            yield client

    @pytest.mark.usefixtures("bucket")
    def test_a_model_is_fetched_whole_and_once(self, whole: Path, tmp_path: Path) -> None:
        ref = locate("s3://models/tiny")
        path = weights.fetch(ref, tmp_path / "m")
        assert {p.name: p.read_bytes() for p in path.iterdir()} == {
            p.name: p.read_bytes() for p in whole.iterdir()
        }
        times = {p: p.stat().st_mtime_ns for p in path.iterdir()}
        os.truncate(path / "tokenizer.json", 5)
        weights.fetch(ref, tmp_path / "m")
        again = [p.name for p in path.iterdir() if p.stat().st_mtime_ns != times[p]]
        assert again == ["tokenizer.json"]

    def test_a_model_without_safetensors_is_converted_when_its_files_have_changed(
        self, bucket: Any, whole: Path, tmp_path: Path
    ) -> None:
        bucket.delete_object(Bucket="models", Key="tiny/model.safetensors")
        bucket.put_object(Bucket="models", Key="tiny/pytorch_model.bin", Body=pickled(whole))
        ref, kept = locate("s3://models/tiny"), tmp_path / "m" / "model.safetensors"
        assert weights.fetch(ref, tmp_path / "m") == tmp_path / "m"
        assert load_file(kept).keys() == load_file(whole / "model.safetensors").keys()
        assert not (tmp_path / "m-bin").exists()
        made = kept.stat().st_mtime_ns
        weights.fetch(ref, tmp_path / "m")
        assert kept.stat().st_mtime_ns == made
        bucket.put_object(Bucket="models", Key="tiny/pytorch_model.bin", Body=pickled(whole, "float64"))
        weights.fetch(ref, tmp_path / "m")
        assert kept.stat().st_mtime_ns > made

    @pytest.mark.usefixtures("bucket")
    def test_the_shape_comes_from_config_json_alone(self) -> None:
        assert resolve("s3://models/tiny/").spec.hidden == 256

    @pytest.mark.parametrize(
        ("url", "said"), [("s3://models/none", "no model"), ("s3://nowhere/tiny", "no such bucket")]
    )
    @pytest.mark.usefixtures("bucket")
    def test_what_is_not_there_is_named(self, tmp_path: Path, url: str, said: str) -> None:
        with pytest.raises(UserError, match=f"{url}.*{said}"):
            weights.fetch(locate(url), tmp_path / "m")

    @pytest.mark.usefixtures("bucket")
    def test_too_little_space_stops_it_before_the_download(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = shutil.disk_usage
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
        with pytest.raises(UserError, match=r"needs 20 MiB, .* has 0 MiB free"):
            weights.fetch(locate("s3://models/tiny"), tmp_path / "m")
        assert not (tmp_path / "m").exists()

    def test_a_full_disk_leaves_no_half_file_under_a_weights_name(
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


def test_a_local_model_is_used_in_place_and_checked(whole: Path, folder: Path, tmp_path: Path) -> None:
    assert weights.fetch(locate(str(whole)), tmp_path / "unused") == whole.resolve()
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
