"""Readers of files and responses of other systems, each with a valid input, in READERS."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checklist import measurements, options, past_runs, result
from checklist.checks.gpu import dcgm_probe
from checklist.checks.host import cloud
from checklist.checks.network import lldp_probe
from checklist.judging import thresholds
from checklist.measurements import Diagnosed
from checklist.outputs import taint
from decorators.backends import pod_template
from decorators.backends.kubernetes import images
from decorators.packed_plan import pack, unpack
from estimator import untrusted
from estimator.calibration.finished import Store
from estimator.errors import UserError
from estimator.hardware.catalogue import csv_files
from estimator.hardware.cluster.api import ApiRefusedError, failure_of
from estimator.hardware.cluster.nodes import hami_gpus
from estimator.hardware.cluster.pools import read_autoscalers
from estimator.hardware.cluster.quantities import quantity
from estimator.models import hf_files
from estimator.planner_page import pasted
from estimator.rightsizing.usage import Sizes, Usage
from launchers import settings
from launchers.cluster.allocation import expand_hosts
from launchers.dataset import files, preferences, prompts, rows, sources, texts
from launchers.harness import tasks
from launchers.images import clip_score, decoding, pictures
from launchers.inference import finished, servers, side_by_side
from launchers.models import files as model_files
from launchers.models import own_code, pipelines
from launchers.precompute import latents
from launchers.settings import convert, deepspeed_file
from launchers.store.bundles import LocalStorage, get_bundle
from tests.decorators.backends.plans import node_object, planned

CHAT = {
    "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "weight": 1}]
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
}
HEADER = {
    "__metadata__": {"format": "pt"},
    "a.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
}
NODE = node_object("a")
POD = {
    "kind": "Pod",
    "metadata": {"name": "p", "namespace": "n"},
    "spec": {
        "nodeName": "a",
        "containers": [{"resources": {"requests": {"cpu": "500m", "memory": "1Gi", "nvidia.com/gpu": "1"}}}],
    },
    "status": {"phase": "Running"},
}
USAGE = Usage(
    flow="F",
    step="train",
    run="1",
    task="2",
    attempt=0,
    at=1.0,
    seconds=2.0,
    ending="succeeded",
    requested=Sizes(cpu=2),
    parameters=(("a", "1"),),
    memory_bytes=1,
    cpu=0.5,
).to_json()
PLAN = planned("llama-8b", "lora", "H100", 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """One reader; it gets the path of the damaged input."""

    read: Callable[[Path], object]
    seed: bytes
    file: str = "input.json"
    others: Mapping[str, bytes] = field(default_factory=dict)  # valid files next to it
    refusals: tuple[type[Exception], ...] = (UserError,)  # what its docstring says it raises


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def every(iterable: Any) -> int:
    return sum(1 for _ in iterable)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def safetensors(path: Path) -> object:
    """Write the damaged JSON as the header of a safetensors file."""
    header, file = path.read_bytes(), path.with_name("model.safetensors")
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    return model_files.read_header(file)


def autoscalers(path: Path) -> object:
    def get(at: str, **_: str) -> dict[str, Any]:
        if "configmaps" not in at:
            raise ApiRefusedError(404, "")
        return {"data": {"status": text_of(path)}}

    return read_autoscalers(get, lambda *_, **__: True)


def api_error(path: Path) -> object:
    from kubernetes.client import ApiException

    error = ApiException(status=403, reason="Forbidden")
    error.body = path.read_bytes().decode(errors="replace")
    return failure_of(error)


def bundle(path: Path) -> object:
    storage = LocalStorage(path.parent / "store")
    storage.put_bytes("b/manifest.json", path.read_bytes())
    return get_bundle(storage, "b", path.parent / "fetched")


def tar(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def png() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


def parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet as written

    file = io.BytesIO()
    written.write_table(pyarrow.table({"prompt": ["a", "b"], "completion": ["c", "d"]}), file)
    return file.getvalue()


def whole_dataset(path: Path) -> int:
    return every(rows.read(path))


def pictures_of(path: Path) -> int:
    return every(pictures.read(path, min_side=1))


READERS: dict[str, Reader] = {
    "config.json, its shape": Reader(
        read=lambda path: hf_files.read_directory(path.parent), seed=dumped(LLAMA), file="config.json"
    ),
    "config.json and weights": Reader(
        read=lambda path: model_files.check_complete(path.parent),
        seed=dumped(LLAMA),
        file="config.json",
        others={"tokenizer.json": b"{}"},
    ),
    "tokenizer_config.json": Reader(
        read=lambda path: own_code.check_model(path.parent),
        seed=dumped({"tokenizer_class": "LlamaTokenizer", "auto_map": {"AutoTokenizer": ["a.B", None]}}),
        file="tokenizer_config.json",
    ),
    "index of weights": Reader(
        read=lambda path: model_files.weight_files(path.parent),
        seed=dumped({"metadata": {}, "weight_map": {"a.weight": "model-1.safetensors"}}),
        file="model.safetensors.index.json",
    ),
    "header of safetensors": Reader(read=safetensors, seed=dumped(HEADER)),
    "index of a pipeline": Reader(
        read=lambda path: pipelines.check_complete(path.parent),
        seed=dumped(
            {"_class_name": "StableDiffusionXLPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
        ),
        file="model_index.json",
    ),
    "pipeline, its shape": Reader(
        read=lambda path: hf_files.read_directory(path.parent),
        seed=dumped({"_class_name": "StableDiffusionXLPipeline"}),
        file="model_index.json",
    ),
    "finished adapter": Reader(
        read=lambda path: finished.from_folder(path.parent).spec(),
        seed=dumped({"base_model_name_or_path": "llama-8b", "task_type": "CAUSAL_LM", "peft_type": "LORA"}),
        file="adapter_config.json",
    ),
    "plan of a finished model": Reader(
        read=lambda path: finished.from_folder(path.parent / "model"),
        seed=dumped({"request": {"gpu_type": "H100"}}),
        file="plan.json",
        others={"model/config.json": dumped(LLAMA)},
    ),
    "settings of a finished model": Reader(
        read=lambda path: finished.from_folder(path.parent / "model"),
        seed=dumped({"model": "llama-8b", "method": "lora"}),
        file="settings.yaml",
        others={"model/config.json": dumped(LLAMA)},
    ),
    "CLIP model": Reader(
        read=lambda path: clip_score.check(str(path.parent)),
        seed=dumped({"model_type": "clip"}),
        file="config.json",
    ),
    "chats, JSONL": Reader(
        read=whole_dataset, seed=dumped(CHAT) + b"\n" + dumped(CHAT | TOOLS), file="a.jsonl"
    ),
    "chats, JSON": Reader(read=whole_dataset, seed=dumped([CHAT, CHAT]), file="a.json"),
    "tool calls": Reader(
        read=whole_dataset,
        seed=dumped(
            [{**TOOLS, "messages": [*CHAT["messages"][:1], {"role": "assistant", "tool_calls": [CALL]}]}]
        ),
        file="a.json",
    ),
    "prompts and completions, CSV": Reader(
        read=whole_dataset, seed=b'prompt,completion\na,"b,\nc"\n', file="a.csv"
    ),
    "prompts and completions, Parquet": Reader(read=whole_dataset, seed=parquet(), file="a.parquet"),
    "pairs": Reader(
        read=lambda path: every(preferences.read(path)),
        seed=dumped([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        file="a.json",
    ),
    "judged answers": Reader(
        read=lambda path: every(preferences.read_judged(path)),
        seed=dumped([{"prompt": "a", "completion": "b", "label": True}]),
        file="a.json",
    ),
    "prompts of a dataset": Reader(
        read=lambda path: every(prompts.read(path)), seed=dumped([{"prompt": "a"}]), file="a.json"
    ),
    "plain text": Reader(read=lambda path: every(texts.read(path)), seed=b"one\n\ntwo\n", file="a.txt"),
    "splits of a dataset": Reader(
        read=lambda path: sources.local_path(str(path.parent)),
        seed=dumped({"splits": ["train"]}),
        file="dataset_dict.json",
    ),
    "saved dataset": Reader(
        read=lambda path: every(files.open_rows(path.parent)),
        seed=dumped({"_data_files": [{"filename": "data-0.arrow"}], "_split": None}),
        file="state.json",
    ),
    "image": Reader(
        read=lambda path: decoding.checked(path.read_bytes(), min_side=1),
        seed=png(),
        file="a.png",
        refusals=(files.BadRow,),
    ),
    "images in a tar": Reader(read=pictures_of, seed=tar(("a.png", png()), ("a.txt", b"red")), file="a.tar"),
    "rows of images": Reader(
        read=pictures_of,
        seed=dumped([{"file_name": "a.png", "text": "red"}]),
        file="a.json",
        others={"a.png": png()},
    ),
    "files that rows of images name": Reader(
        read=pictures.named_files,
        seed=dumped([{"file_name": "a.png", "text": "red"}]),
        file="a.json",
        others={"a.png": png()},
    ),
    "settings": Reader(
        read=lambda path: settings.parse_yaml(text_of(path)),
        seed=dumped({"model": "llama-8b", "method": "lora", "lora": {"rank": 8}, "mixture": {"a.jsonl": 1}}),
        file="settings.yaml",
    ),
    "options of the checklist": Reader(
        read=lambda path: options.parse_yaml(options.Options, text_of(path)),
        seed=dumped({"nodes": 4}),
        file="a.yaml",
    ),
    "configuration of another tool": Reader(
        read=lambda path: convert.convert(convert.read(path)),
        seed=dumped(
            {"base_model": "a/b", "datasets": [{"path": "x"}], "learning_rate": 1e-4, "adapter": "lora"}
        ),
        file="a.yaml",
    ),
    "DeepSpeed's configuration": Reader(
        read=lambda path: deepspeed_file.settings_of(str(path)),
        seed=dumped({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "train_batch_size": 8}),
    ),
    "pod template": Reader(
        read=lambda path: pod_template.read(str(path)),
        seed=dumped({"spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": 1}}}]}}),
        file="a.yaml",
    ),
    "task of the harness": Reader(
        read=lambda path: tasks.portable(str(path)),
        seed=dumped(
            {"task": "a", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "t.jsonl"}}}
        ),
        file="a.yaml",
    ),
    "prompts to compare runs with": Reader(
        read=side_by_side.read_prompts, seed=dumped({"prompt": "a"}) + b"\n" + dumped(CHAT), file="a.jsonl"
    ),
    "plan in a variable": Reader(read=lambda path: unpack(text_of(path)), seed=pack(PLAN).encode()),
    "plan": Reader(read=lambda path: unpack(untrusted.pack(text_of(path))), seed=PLAN.to_json().encode()),
    "manifest of a bundle": Reader(
        read=bundle, seed=dumped({"files": [{"name": "a", "size": 1, "sha256": "0" * 64}]})
    ),
    "result of the checklist": Reader(read=result.read, seed=dumped({"version": result.SCHEMA_VERSION})),
    "earlier run of the checklist": Reader(
        read=lambda path: past_runs.from_json(text_of(path)),
        seed=dumped({"version": past_runs.SCHEMA_VERSION}),
    ),
    "neighbors of lldpd": Reader(
        read=lambda path: lldp_probe.parse(text_of(path)),
        seed=dumped({"lldp": [{"interface": [{"name": "a", "chassis": [{"name": [{"value": "b"}]}]}]}]}),
    ),
    "measurements": Reader(
        read=lambda path: measurements.from_json(text_of(path)),
        seed=dumped({"version": measurements.SCHEMA_VERSION}),
    ),
    "thresholds": Reader(
        read=lambda path: thresholds.read(path, user=True),
        seed=thresholds.SHIPPED.read_bytes()[:600],
        file="a.csv",
    ),
    "DCGM's answer": Reader(
        read=lambda path: dcgm_probe.read(Diagnosed(node=0, level=1), text_of(path), {}),
        seed=dumped(
            {
                "DCGM Diagnostic": {
                    "test_categories": [{"tests": [{"name": "x", "results": [{"status": "Pass"}]}]}]
                }
            }
        ),
    ),
    "finished runs": Reader(read=lambda path: Store(path).read(), seed=b'{"schema": 1, "run": "a/1"}\n'),
    "hardware of one's own": Reader(
        read=csv_files.read_rows, seed=b"name,memory_gib,vendor\nMy GPU,48,nvidia\n", file="a.csv"
    ),
    "status of the autoscaler": Reader(
        read=autoscalers,
        seed=dumped({"nodeGroups": [{"name": "a", "health": {"cloudProviderTarget": 1, "maxSize": 4}}]}),
    ),
    "pasted config.json": Reader(read=lambda path: pasted.model(text_of(path)), seed=dumped(LLAMA)),
    "pasted nodes and pods": Reader(
        read=lambda path: pasted.cluster(text_of(path)), seed=dumped({"items": [NODE, POD]})
    ),
    "error of the API server": Reader(read=api_error, seed=dumped({"message": "forbidden", "code": 403})),
    "marks of a node": Reader(
        read=lambda path: taint._reasons(text_of(path)),
        seed=dumped([{"check": "gemm", "verdict": "FAIL", "reason": "slow", "at": 1.0}]),
    ),
    "labels of a node": Reader(
        read=lambda path: cloud._labels(text_of(path)), seed=dumped({"metadata": {"labels": {"a": "b"}}})
    ),
    "usage of a task": Reader(
        read=lambda path: Usage.from_json(text_of(path)), seed=USAGE.encode(), refusals=(ValueError,)
    ),
    "rank of an adapter": Reader(
        read=lambda path: servers._lora_rank(path.parent),
        seed=dumped({"peft_type": "LORA", "r": 8, "rank_pattern": {"q_proj": 16}}),
        file="adapter_config.json",
    ),
    "noise of a pipeline": Reader(
        read=lambda path: latents._noise_config(path.parent.parent),
        seed=dumped({"scaling_factor": 0.13}),
        file="vae/config.json",
        others={"scheduler/scheduler_config.json": dumped({"num_train_timesteps": 1000})},
    ),
    "manifest of an image": Reader(
        read=lambda path: images.architectures_in(path.read_bytes(), lambda _: b"{}"),
        seed=dumped({"manifests": [{"platform": {"architecture": "amd64"}}]}),
        refusals=images.UNREADABLE,
    ),
    "GPUs of HAMi": Reader(
        read=lambda path: hami_gpus(text_of(path)),
        seed=dumped([{"id": "GPU-a", "devmem": 81000}]),
    ),
    "Kubernetes amount": Reader(read=lambda path: quantity(text_of(path)), seed=b"96Gi"),
    "node list of Slurm": Reader(read=lambda path: expand_hosts(text_of(path)), seed=b"gpu[03-05,9],login"),
}
