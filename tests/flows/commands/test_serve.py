"""``finetune serve``: a server process answers the OpenAI client and leaves no process."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from estimator.errors import UserError
from flows.commands import chat, serve
from launchers.inference import finished, memory
from launchers.models import tiny_llama
from tests.flows.conftest import environment, left_behind
from tests.lab.control_plane import ControlPlane

ROOT = Path(__file__).parents[3]
QUESTION = [{"role": "user", "content": "What is a router?"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {**tiny_llama.CONFIG, "num_hidden_layers": 1}
    return tiny_llama.make(tmp_path_factory.mktemp("models") / "tiny", config=config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "server",
    [
        "transformers",
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.nightly,
                pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
            ],
        ),
    ],
)
def test_the_openai_client_gets_the_answers_of_generate_and_sigterm_ends_all_processes(
    server: str, model_dir: Path, tmp_path: Path
) -> None:
    from openai import APIStatusError, OpenAI

    from launchers.inference.conversation import Conversation, Sampling, load_finetuned

    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "estimator.cli.app", "serve", str(model_dir)),
            *("--port=0", "--name=mine", f"--server={server}", "--device=cpu"),
        ],
        cwd=tmp_path,
        env={**environment(tmp_path), "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    limit = threading.Timer(240, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        shown = ""
        while not (match := re.search(r"URL +(\S+)", shown)):
            line = process.stdout.readline()
            assert line, shown
            shown += line
        with OpenAI(base_url=match[1], api_key="none", timeout=60, max_retries=0) as client:
            answer = client.chat.completions.create(
                model="mine", messages=QUESTION, max_tokens=12, temperature=0
            )
            with pytest.raises(APIStatusError):
                client.chat.completions.create(model="other", messages=QUESTION, max_tokens=1)
            pieces = client.chat.completions.create(
                model="mine", messages=QUESTION, max_tokens=12, temperature=0, stream=True
            )
            streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        limit.cancel()
        process.kill()
        process.wait()
    assert left_behind(tmp_path) == []
    loaded = load_finetuned(finished.from_folder(model_dir), "cpu", tmp_path)
    sampling = Sampling(max_new_tokens=12, temperature=0)
    expected = Conversation(loaded=loaded, sampling=sampling).ask(QUESTION[0]["content"]).text
    assert (answer.choices[0].message.content, streamed) == (expected, expected)


def test_manifests_need_a_gpu_and_a_volume_claim(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"The GPU for serving .* is unknown"):
        serve.serve(str(model_dir), with_="kubernetes")
    with pytest.raises(UserError, match="Pods cannot read"):
        serve.serve(str(model_dir), with_="kubernetes", gpu="L4")
    with pytest.raises(UserError, match="--apply requires"):
        serve.serve(str(model_dir), apply=True)
    serve.serve(str(model_dir), with_="kubernetes", gpu="L4", volume="models:tiny", name="mine")
    shown = capsys.readouterr()
    deployment, service = yaml.safe_load_all(shown.out)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["serve", "/model/tiny"]
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    assert "kubectl port-forward service/mine 8000" in shown.err


def test_an_adapter_on_a_volume_claim_is_served_on_its_hub_base_and_refused_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    for base in ("llama-8b", "tiny-llama"):
        adapter = finished.FinishedModel(name="mine", folder=tmp_path, base=base, gpu="L40S")
        monkeypatch.setattr(serve, "find", lambda _, adapter=adapter: adapter)
        if base == "tiny-llama":
            with pytest.raises(UserError, match=r"its base tiny-llama is not on the Hugging Face Hub"):
                serve.serve("mine", with_="kubernetes", volume="models:runs/17/adapter")
            continue
        serve.serve("mine", with_="kubernetes", volume="models:runs/17/adapter")
        deployment, _ = yaml.safe_load_all(capsys.readouterr().out)
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["args"][:2] == ["serve", "meta-llama/Llama-3.1-8B"]
        assert "mine=/model/runs/17/adapter" in container["args"]


def test_a_model_by_name_is_checked_before_its_weights_are_fetched(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(*_: object, **__: object) -> Path:
        raise AssertionError

    monkeypatch.setattr(finished, "fetch_cached", fetch)
    monkeypatch.setattr(
        memory, "free_memory", lambda device: memory.Memory(device=device, free_bytes=(2**30,))
    )
    with pytest.raises(UserError, match=r"llama-70b needs .* in memory to serve"):
        serve.serve("llama-70b", port=0, device="cpu")
    with pytest.raises(UserError, match=r"llama-70b needs .* in this machine's memory"):
        chat.chat("llama-70b", device="cpu")
    serve.serve("llama-8b", with_="kubernetes", gpu="L40S")
    deployment, _ = yaml.safe_load_all(capsys.readouterr().out)
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][:2] == ["serve", "meta-llama/Llama-3.1-8B"]


@pytest.mark.slow
def test_applying_twice_creates_one_deployment_and_one_service(
    model_dir: Path, control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    from estimator.hardware.cluster.api import ClusterApi

    namespace = control_plane.namespace("serving")
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig()))
    for requests in (2, 4):
        serve.serve(
            str(model_dir),
            with_="kubernetes",
            apply=True,
            namespace=namespace,
            gpu="L4",
            volume="models",
            name="mine",
            requests=requests,
        )
    with ClusterApi() as api:
        deployments = api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments")["items"]
        services = api.get(f"/api/v1/namespaces/{namespace}/services")["items"]
    (container,) = deployments[0]["spec"]["template"]["spec"]["containers"]
    assert (len(deployments), [each["metadata"]["name"] for each in services]) == (1, ["mine"])
    assert container["args"][container["args"].index("--max-num-seqs") + 1] == "4"
