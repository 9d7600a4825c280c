"""Selection and command of the inference server, and refusals."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from estimator.inference.serving import Serving
from launchers.inference import finished, merging, servers
from launchers.inference.servers import Endpoint
from tests.lab.configs import config

SERVING = Serving(device="cuda", gpus=2, context=4096, requests=8, memory={"weights": 1}, capacity_bytes=2)
ANY = "0.0.0.0"  # noqa: S104
ENDPOINT = Endpoint(host="127.0.0.1", port=8000, model="mine")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of packages that are found; a test changes them."""
    names = {"vllm", "fastapi", "uvicorn", "openai"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in names else None)
    return names


def test_vllm_serves_on_gpus_where_it_is_installed_and_transformers_elsewhere(installed: set[str]) -> None:
    assert servers.choose("cuda", None, token=True) == "vllm"
    assert servers.choose("cpu", None, token=False) == "transformers"
    with pytest.raises(UserError, match="checks no token"):
        servers.choose("cpu", None, token=True)
    installed.remove("vllm")
    assert servers.choose("cuda", None, token=False) == "transformers"
    with pytest.raises(UserError, match=r"(?s)vllm is not installed.*metaflow-finetune\[vllm\]"):
        servers.choose("cuda", "vllm", token=False)
    installed.remove("uvicorn")
    with pytest.raises(
        UserError, match=r"(?s)needed by transformers serve: uvicorn.*metaflow-finetune\[serve\]"
    ):
        servers.choose("cpu", None, token=False)


def test_the_vllm_command_has_the_model_name_the_layout_and_an_allowed_adapter_rank(
    adapter_dir: Path, tmp_path: Path
) -> None:
    arguments = servers.vllm_arguments("org/base", ENDPOINT, SERVING)
    assert arguments[:4] == ["serve", "org/base", "--served-model-name", "mine"]
    assert ("--tensor-parallel-size", "2") in pairwise(arguments)
    arguments = servers.vllm_arguments("org/base", ENDPOINT, SERVING, adapter=adapter_dir)
    options = dict(pairwise(arguments))
    assert (options["--lora-modules"], options["--max-lora-rank"]) == (f"mine={adapter_dir}", "8")
    assert "--served-model-name" not in arguments
    assert servers.serves_adapter(finished.from_folder(adapter_dir))
    for name, value in {
        "use_dora": True,
        "r": 600,
        "modules_to_save": ["lm_head"],
        "peft_type": "IA3",
    }.items():
        other = tmp_path / name
        shutil.copytree(adapter_dir, other)
        values: dict[str, Any] = json.loads((other / "adapter_config.json").read_text())
        (other / "adapter_config.json").write_text(json.dumps({**values, name: value}))
        assert not servers.serves_adapter(finished.from_folder(other)), name
    quantized = finished.FinishedModel(name="q", folder=adapter_dir, settings=config({"method": "qlora"}))
    assert not servers.serves_adapter(quantized)


def test_the_transformers_server_gets_the_model_under_the_name_used_in_requests(
    model_dir: Path, tmp_path: Path
) -> None:
    arguments = servers.local_command(
        "transformers", model_dir, ENDPOINT, SERVING, adapter=None, work=tmp_path
    )
    assert arguments[arguments.index("serve") + 1] == "mine"
    assert (tmp_path / "mine" / "config.json").is_file()


def test_a_port_in_use_is_refused_and_port_0_selects_a_free_port() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(UserError, match=r"(?s)Port .* cannot be used: Address already in use.*--port 0"):
            servers.free_port("127.0.0.1", other.getsockname()[1])
    assert servers.free_port("127.0.0.1", 0) > 0


def test_a_server_that_ends_before_it_is_healthy_is_reported_with_its_last_line(tmp_path: Path) -> None:
    command = [shutil.which("bash") or "", "-c", "echo out of paper; exit 3"]
    log = tmp_path / "log"
    endpoint = Endpoint(host="127.0.0.1", port=servers.free_port("127.0.0.1", 0), model="mine")
    with (
        pytest.raises(UserError, match="ended with status 3: out of paper"),
        servers.running(command, endpoint, tmp_path, log, on_cpu=True, start_s=60),
    ):
        pass


def test_the_usage_text_shows_the_variable_of_the_token_and_never_its_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(servers.TOKEN_VARIABLE, "hush")
    text = ENDPOINT.usage(token=True)
    assert "hush" not in text
    assert f"Bearer ${servers.TOKEN_VARIABLE}" in text
    assert servers.warning(ENDPOINT, token=False) is None
    everywhere = Endpoint(host=ANY, port=1, model="m")
    assert "anybody" in (servers.warning(everywhere, token=False) or "")
    assert servers.warning(everywhere, token=True) is None


def test_a_merged_adapter_gives_the_answers_of_the_adapter_on_its_base(
    adapter_dir: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from launchers.inference.conversation import load_finetuned

    model = finished.from_folder(adapter_dir)
    full_model = AutoModelForCausalLM.from_pretrained(
        merging.merged(model, tmp_path / "merged"), dtype=torch.float32
    )
    assert (tmp_path / "merged" / "generation_config.json").read_text() == '{"max_new_tokens": 7}'
    adapted = load_finetuned(model, "cpu", tmp_path)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.allclose(full_model(ids).logits, adapted.model(ids).logits, atol=1e-4)
