"""finetune serve: an OpenAI-compatible endpoint for a finished model, here or on Kubernetes."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from estimator.errors import UserError
from estimator.terminal import print, write_data
from flows.commands.chat import ModelArgument, find

if TYPE_CHECKING:
    from estimator.inference.serving import Serving
    from launchers.inference.finished import FinishedModel
    from launchers.inference.manifests import Stored
    from launchers.inference.servers import Endpoint, ServerName

LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"  # noqa: S104 - inside a pod, behind its Service


def serve(
    model: ModelArgument = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is reachable from other machines.")
    ] = LOOPBACK,
    name: Annotated[
        str | None, typer.Option(help="Name of the model in requests [default: MODEL-finetuned]")
    ] = None,
    server: Annotated[
        Literal["vllm", "transformers"] | None,
        typer.Option(
            help="Server to start: vllm or transformers [default: vllm on GPUs where it is installed]"
        ),
    ] = None,
    device: Annotated[
        Literal["auto", "cuda", "cpu"],
        typer.Option(help="Device: auto (GPUs if there are any), cuda or cpu."),
    ] = "auto",
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Maximum tokens of a request with its answer [default: the model's limit, at most 8192]",
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Number of concurrent requests that the KV cache is sized for.")
    ] = 8,
    start_timeout: Annotated[
        float, typer.Option(min=1, help="Maximum seconds until the server is ready.")
    ] = 900,
    with_: Annotated[
        Literal["kubernetes"] | None,
        typer.Option(
            "--with",
            metavar="kubernetes",
            help="Print a Deployment and a Service for Kubernetes instead of starting a server here.",
        ),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="With --with kubernetes: apply them to the current context.")
    ] = False,
    namespace: Annotated[str, typer.Option(help="With --apply: Kubernetes namespace.")] = "default",
    gpu: Annotated[
        str | None, typer.Option(help="With --with kubernetes: GPU model [default: that of the run]")
    ] = None,
    max_gpus: Annotated[
        int, typer.Option(min=1, help="With --with kubernetes: maximum number of GPUs per node.")
    ] = 8,
    volume: Annotated[
        str | None,
        typer.Option(
            metavar="CLAIM[:PATH]",
            help="With --with kubernetes: PersistentVolumeClaim that has the model's folder "
            "[default: the model is read from the Hub, or from the run's S3 datastore]",
        ),
    ] = None,
) -> None:
    """Serve a finished model to OpenAI clients: vLLM where it is installed, else transformers serve.

    The environment variable VLLM_API_KEY is the token that requests need (vLLM only).
    """
    if apply and with_ is None:
        raise UserError("--apply requires --with kubernetes.", "Add --with kubernetes, or remove --apply.")

    token = bool(os.environ.get("VLLM_API_KEY"))
    finished = find(model)
    if with_ is not None:
        _serve_on_kubernetes(
            finished,
            name=name,
            port=port or 8000,
            context=context,
            requests=requests,
            gpu=gpu,
            max_gpus=max_gpus,
            volume=volume,
            token=token,
            namespace=namespace if apply else None,
        )
        return
    _serve_locally(
        finished,
        name=name,
        host=host,
        port=port,
        server=server,
        device=device,
        context=context,
        requests=requests,
        start_s=start_timeout,
        token=token,
    )


def _serve_locally(
    finished: FinishedModel,
    *,
    name: str | None,
    host: str,
    port: int,
    server: ServerName | None,
    device: Literal["auto", "cuda", "cpu"],
    context: int | None,
    requests: int,
    start_s: float,
    token: bool,
) -> None:
    """Start a server on this machine, print how it is used, and wait until it is interrupted."""
    from estimator.inference.serving import VLLM_SHARE, plan_serving
    from launchers.base.imports import imported_quietly
    from launchers.cluster.processes import sigterm_raises
    from launchers.inference import memory, servers
    from launchers.results.model_card import cache_folder

    spec = finished.spec()
    endpoint = servers.Endpoint(
        host=host, port=servers.free_port(host, port), model=name or finished.name.replace("/", "--")
    )
    with imported_quietly():
        picked = memory.pick_device(device)
    selected = servers.choose(picked, server, token=token)
    free = memory.free_memory(picked).free_bytes
    if selected == "vllm":
        free = tuple(int(size * VLLM_SHARE) for size in free)
    serving = plan_serving(
        finished.name, spec, device=picked, free_bytes=free, context=context, requests=requests
    )
    finished = finished.fetched()
    folder = cache_folder() / "serve"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{endpoint.port}.log"
    with sigterm_raises(), tempfile.TemporaryDirectory(prefix="finetune-serve-") as temporary:
        work_dir = Path(temporary)
        command = _command(finished, selected, endpoint, serving, work_dir)
        print(f"Starting {endpoint.model} with {selected}: {serving.text()}", file=sys.stderr, flush=True)
        with servers.running(
            command, endpoint, work_dir, log, on_cpu=picked == "cpu", start_s=start_s
        ) as process:
            print(endpoint.usage(token=token), flush=True)
            print(f"log     {log}\nCtrl-C stops the server.", file=sys.stderr, flush=True)
            if note := servers.warning(endpoint, token=token):
                print(note, file=sys.stderr, flush=True)
            servers.wait(process, log)


def _command(
    finished: FinishedModel, selected: ServerName, endpoint: Endpoint, serving: Serving, work_dir: Path
) -> list[str]:
    """Prepare the files that the server loads, and return the command that starts it."""
    from launchers.base.imports import imported_quietly
    from launchers.inference import servers
    from launchers.inference.finished import fetch_cached

    folder, adapter = finished.folder, None
    if finished.is_adapter and selected == "vllm" and servers.serves_adapter(finished):
        folder, adapter = fetch_cached(finished.base_source()), finished.folder
    elif finished.is_adapter:
        print(f"Merging the adapter {finished.folder} into its base", file=sys.stderr, flush=True)
        with imported_quietly():
            from launchers.inference import merging
        folder = merging.merged(finished, work_dir / "merged")
    return servers.local_command(selected, folder, endpoint, serving, adapter=adapter, work=work_dir)


def _serve_on_kubernetes(
    finished: FinishedModel,
    *,
    name: str | None,
    port: int,
    context: int | None,
    requests: int,
    gpu: str | None,
    max_gpus: int,
    volume: str | None,
    token: bool,
    namespace: str | None,
) -> None:
    """Print the objects, or apply them to a namespace."""
    import yaml

    from estimator import hardware
    from estimator.inference.serving import VLLM_SHARE, plan_serving
    from launchers.inference import manifests, servers

    gpu_type = gpu or finished.gpu
    if gpu_type is None:
        raise UserError(
            f"The GPU for serving {finished.name} is unknown: no run of it used one.", "Add --gpu L4."
        )
    model = _pod_model(finished, volume)
    usable = int(hardware.gpu(gpu_type).usable_bytes * VLLM_SHARE)
    serving = plan_serving(
        finished.name,
        finished.spec(),
        device="cuda",
        free_bytes=(usable,) * max_gpus,
        context=context,
        requests=requests,
    )
    endpoint = servers.Endpoint(host=ANY, port=port, model=name or finished.name.replace("/", "--"))
    objects = manifests.manifests(
        endpoint,
        serving,
        gpu=gpu_type,
        source=model.source,
        claim=model.claim,
        stored=model.stored,
        adapter=finished.folder if model.adapter_path is not None else None,
        adapter_path=model.adapter_path,
        token=token,
    )
    resource = manifests.resource_name(endpoint.model)
    if namespace is None:
        print(f"# {serving.text()}, {gpu_type}")
        write_data(yaml.safe_dump_all(objects, sort_keys=False))
    else:
        _apply(objects, namespace)
    steps = [f"kubectl port-forward service/{resource} {port}"]
    if token:
        key = f"--from-literal=token=${servers.TOKEN_VARIABLE}"
        steps.insert(0, f"kubectl create secret generic {resource}-token {key}")
    for step in steps:
        print(f"next: {step}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PodModel:
    """Location of a model for a pod."""

    source: str  # for vLLM: a Hugging Face id or a path in the pod; with an adapter, of its base
    claim: str | None = None  # PersistentVolumeClaim that holds the model or the adapter
    stored: Stored | None = None  # in S3
    adapter_path: str | None = None  # in the pod


def _pod_model(finished: FinishedModel, volume: str | None) -> _PodModel:
    """Locate the model for a pod. Raises UserError if pods cannot read it, or its base."""
    from decorators.finished_models import stored_in_s3
    from launchers.inference import servers
    from launchers.inference.manifests import MODEL_FOLDER

    if volume is not None:
        claim, _, folder = volume.partition(":")
        path = str(Path(MODEL_FOLDER, folder.lstrip("/")))
        if not finished.is_adapter:
            return _PodModel(source=path, claim=claim)
        base = finished.base_source()
        if base.kind not in ("table", "hub") or not servers.serves_adapter(finished):
            reason = (
                f"its base {base.name} is not on the Hugging Face Hub"
                if base.kind not in ("table", "hub")
                else "vLLM cannot apply it to its base"
            )
            raise UserError(
                f"{finished.name} is an adapter, and {reason}.",
                "Train without --adapter-only, and name the merged model.",
            )
        return _PodModel(source=base.location, claim=claim, adapter_path=path)
    if finished.source is not None and finished.source.kind in ("table", "hub"):
        return _PodModel(source=finished.source.location)
    pushed = finished.settings.export.push if finished.settings is not None else None
    if pushed and not finished.is_adapter:
        return _PodModel(source=pushed)
    stored = None if finished.is_adapter else stored_in_s3(finished)
    if stored is not None:
        return _PodModel(source=str(Path(MODEL_FOLDER, stored.path)), stored=stored)
    raise UserError(
        f"Pods cannot read {finished.folder}.",
        "Copy it to a PersistentVolumeClaim (--volume CLAIM:PATH), or train with --push or an S3 datastore"
        f"{', without --adapter-only' if finished.is_adapter else ''}.",
    )


def _apply(objects: list[dict[str, Any]], namespace: str) -> None:
    from estimator.hardware.cluster.api import ApiRefusedError, ClusterApi, UnreachableError, api_error

    with ClusterApi(purpose="Applying to Kubernetes") as api:
        for item in objects:
            name, kind = item["metadata"]["name"], item["kind"].lower()
            root = "/apis/apps/v1" if kind == "deployment" else "/api/v1"
            try:
                api.apply(f"{root}/namespaces/{namespace}/{kind}s/{name}", item)
            except (ApiRefusedError, UnreachableError) as error:
                rule = f"get, create and patch of {kind}s in {namespace}"
                raise api_error(error, api.server, permission=rule) from None
            print(f"applied {kind}/{name} in namespace {namespace}")
