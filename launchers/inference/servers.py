"""OpenAI-compatible servers for a finished model: vLLM where it is installed, else ``transformers serve``.

This module chooses, starts, monitors and stops these servers of other projects.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from estimator.errors import UserError
from estimator.inference.serving import Serving
from estimator.untrusted import read_json_object
from launchers.cluster.processes import is_loopback, relevant_tail, started
from launchers.inference.finished import ADAPTER_CONFIG, FinishedModel

ServerName = Literal["vllm", "transformers"]
TOKEN_VARIABLE = "VLLM_API_KEY"  # noqa: S105 - vLLM's name of the variable
TRANSFORMERS_NEEDS = ("fastapi", "uvicorn", "openai")  # transformers 5.23, utils/import_utils.py
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # vLLM 0.32, config/lora.py
STOP_S = 20.0  # time between SIGTERM and SIGKILL
_POLL_S = 0.2
_REQUEST_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Address of a server, and the name of its model in requests."""

    host: str
    port: int
    model: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def usage(self, *, token: bool) -> str:
        """Return a curl command and three lines of Python that send a first request."""
        messages = [{"role": "user", "content": "Hello"}]
        body = json.dumps({"model": self.model, "messages": messages})
        header = f'-H "Authorization: Bearer ${TOKEN_VARIABLE}" ' if token else ""
        key = f'os.environ["{TOKEN_VARIABLE}"]' if token else '"none"'
        imports = "import os; from openai import OpenAI" if token else "from openai import OpenAI"
        return "\n".join(
            [
                f"URL     {self.url}",
                f"curl    curl {self.url}/chat/completions {header}-H 'Content-Type: application/json' "
                f"-d {shlex.quote(body)}",
                f"Python  {imports}",
                f'        client = OpenAI(base_url="{self.url}", api_key={key})',
                f'        print(client.chat.completions.create(model="{self.model}", messages={messages!r})'
                ".choices[0].message.content)",
            ]
        )


def choose(device: str, requested: ServerName | None, *, token: bool) -> ServerName:
    """Choose the server: vLLM for GPUs if it is installed, else transformers.

    Raises UserError if packages are missing, or if a token is set that the server would not check.
    """
    has_vllm = importlib.util.find_spec("vllm") is not None
    server: ServerName = requested or ("vllm" if device == "cuda" and has_vllm else "transformers")
    if server == "vllm" and not has_vllm:
        raise UserError(
            "The package vllm is not installed.",
            "pip install 'metaflow-finetune[vllm]', or leave --server out: transformers serves then.",
        )
    missing = [name for name in TRANSFORMERS_NEEDS if importlib.util.find_spec(name) is None]
    if server == "transformers" and missing:
        raise UserError(
            f"Not installed, and needed by transformers serve: {', '.join(missing)}.",
            "pip install 'metaflow-finetune[serve]'",
        )
    if server == "transformers" and token:
        raise UserError(
            f"{TOKEN_VARIABLE} is set, but transformers serve checks no token.",
            f"Unset {TOKEN_VARIABLE}, or serve with vLLM on a GPU: pip install 'metaflow-finetune[vllm]'",
        )
    return server


def serves_adapter(finished: FinishedModel) -> bool:
    """Whether vLLM can apply the adapter to its base (vLLM 0.32, lora/peft_helper.py); else it is merged."""
    path = finished.folder / ADAPTER_CONFIG
    if not path.is_file():
        return False
    values = read_json_object(path)
    unsupported = ("use_dora", "lora_bias", "modules_to_save", "layer_replication", "trainable_token_indices")
    quantized = finished.settings is not None and finished.settings.method.startswith("q")
    return (
        values.get("peft_type") == "LORA"
        and values.get("bias", "none") == "none"
        and _lora_rank(finished.folder) <= LORA_RANKS[-1]
        and not any(values.get(name) for name in unsupported)
        and not quantized  # the adapter was trained on a quantized base
        and not (finished.settings is not None and finished.settings.new_tokens)
    )


def vllm_arguments(
    model: str,
    endpoint: Endpoint,
    serving: Serving,
    *,
    adapter: Path | None = None,
    adapter_path: str | None = None,
) -> list[str]:
    """Build the arguments of ``vllm``.

    Parameters
    ----------
    model:
        Folder or Hugging Face id; with an adapter, of its base.
    adapter_path:
        Path of the adapter on the server's machine; by default its folder on this machine.
    """
    name_options = ["--served-model-name", endpoint.model]
    if adapter is not None:
        rank = next(size for size in LORA_RANKS if size >= _lora_rank(adapter))
        name_options = [
            "--enable-lora",
            "--lora-modules",
            f"{endpoint.model}={adapter_path or adapter}",
            "--max-lora-rank",
            str(rank),
        ]
    return [
        *("serve", model, *name_options),
        *("--host", endpoint.host, "--port", str(endpoint.port)),
        *("--max-model-len", str(serving.context), "--max-num-seqs", str(serving.requests)),
        *(("--tensor-parallel-size", str(serving.gpus)) if serving.gpus > 1 else ()),
        *(("--dtype", "float32") if serving.device == "cpu" else ()),
    ]


def local_command(
    server: ServerName,
    folder: Path,
    endpoint: Endpoint,
    serving: Serving,
    *,
    adapter: Path | None,
    work: Path,
) -> list[str]:
    """Return the command that starts the server in ``work``.

    transformers serve accepts requests only for the model's name on its command line, so ``work`` gets a link
    with the name of the endpoint's model.
    """
    if server == "vllm":
        script = Path(sys.executable).with_name("vllm")
        return [str(script), *vllm_arguments(str(folder), endpoint, serving, adapter=adapter)]
    (work / endpoint.model).symlink_to(folder)
    on_cpu = serving.device == "cpu"
    return [
        *(sys.executable, "-m", "transformers.cli.transformers", "serve", endpoint.model),
        *("--device", "cpu" if on_cpu else "auto", "--dtype", "float32" if on_cpu else "bfloat16"),
        *("--host", endpoint.host, "--port", str(endpoint.port)),
    ]


def free_port(host: str, port: int) -> int:
    """Return ``port``, or for 0 any free one. Raises UserError if it is in use or cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror:
            raise UserError(
                f"--host {host} is no address of this machine.", "Use 127.0.0.1, or 0.0.0.0 for all of them."
            ) from None
        except OSError as error:
            raise UserError(
                f"Port {port} of {host} cannot be used: {error.strerror or error}.",
                "Give another one with --port, or --port 0 for any that is free.",
            ) from None
        number: int = probe.getsockname()[1]
        return number


@contextlib.contextmanager
def running(
    command: list[str], endpoint: Endpoint, work: Path, log: Path, *, on_cpu: bool, start_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, wait until it is healthy, and stop all its processes when the block ends.

    Raises UserError if it ends early, or is not healthy within ``start_s`` seconds.
    """
    request = work / "server.json"
    request.write_text(json.dumps({"command": command, "folder": str(work)}))
    with started("launchers.inference.run_server", request, log, on_cpu=on_cpu, grace_s=STOP_S) as process:
        _wait_until_healthy(process, endpoint, log, start_s)
        yield process


def wait(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server ends by itself, which is an error."""
    status = process.wait()
    raise UserError(f"The server ended with status {status}: {relevant_tail(log, 1)}", f"Its log: {log}")


def _wait_until_healthy(
    process: subprocess.Popen[bytes], endpoint: Endpoint, log: Path, limit_s: float
) -> None:
    deadline = time.monotonic() + limit_s
    while not is_healthy(endpoint):
        if process.poll() is not None:
            wait(process, log)
        if time.monotonic() > deadline:
            raise UserError(
                f"The server was not healthy within {limit_s:g} s.",
                f"Give it more time with --start-timeout; its log: {log}",
            )
        time.sleep(_POLL_S)


def is_healthy(endpoint: Endpoint) -> bool:
    """Whether GET /health answers 200."""
    host = endpoint.host if endpoint.host not in ("0.0.0.0", "::") else "localhost"  # noqa: S104
    connection = http.client.HTTPConnection(host, endpoint.port, timeout=_REQUEST_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def warning(endpoint: Endpoint, *, token: bool) -> str | None:
    """Return a warning if other machines can send requests without a token; None if they cannot."""
    if token or is_loopback(endpoint.host):
        return None
    return (
        f"Warning: {endpoint.host} is reachable from other machines and no token is set: "
        "anybody there can send requests."
    )


def _lora_rank(folder: Path) -> int:
    path = folder / ADAPTER_CONFIG
    values = read_json_object(path)
    try:
        return max([int(values.get("r", 8)), *map(int, (values.get("rank_pattern") or {}).values())])
    except (AttributeError, OverflowError, TypeError, ValueError):
        raise UserError(
            f"{path}: r or rank_pattern is not a rank.", "Use the adapter as it was saved."
        ) from None
