"""Tables of published measurements: each row as a Setup to predict, or the reason why it can't be predicted.

The columns are those of ``data/measured.csv``; a blank cell is unknown. Rows are read by what they say,
never by where they are from: ``estimator/wording.py`` knows the words of tables, ``row_models.py`` models.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from estimator import hardware, row_models, wording
from estimator.errors import UserError
from estimator.hardware import Gpu
from estimator.models import PROJECTIONS
from estimator.setup import Checkpointing, Engine, Precision, Schedule, Setup, StateSharding
from estimator.wording import Kind, Unclaimed

NEEDED = (
    "id",
    "source",
    "model",
    "method",
    "framework",
    "gpu",
    "n_gpus",
    "micro_batch",
    "seq_len",
    "mem_kind",
    "peak_mem_GiB",
    "tps_per_gpu",
    "quality",
)
_BLANK = ("", "n/a", "na", "-", "none", "nan", "?", "unknown")
_MEASURED = ("peak_mem_GiB", "gib_min", "gib_max", "tps_per_gpu", "micro_batch", "seq_len", "n_gpus")

# What an engine's own configuration says where a table leaves it blank: torchtitan's train configs select
# ("selective"), torchtune's recipes recompute everything, Transformers and Megatron-Core nothing.
_CHECKPOINTING: dict[str, Checkpointing] = {"torchtitan": "selective", "torchtune": "full"}
# PEFT's default rank and targets for Llama's kind of models, which are torchtune's and litgpt's targets too
# (peft/tuners/lora/config.py, peft/utils/constants.py); Megatron-Bridge adapts every linear layer at rank 32
# (megatron/bridge/peft/lora.py).
_RANK, _TARGETS = {"megatron": 32}, {"megatron": PROJECTIONS}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published measurement. ``setup`` is None where both reasons say why."""

    id: str
    source: str
    framework: str
    method: str
    quality: str
    kind: Kind | None  # of memory; None where none can be scored
    gib: float | None  # measured peak, GiB on one GPU
    tps_per_gpu: float | None  # tokens/s of one GPU
    gpu_name: str  # as the table writes it
    gpu: Gpu | None  # of the catalogue
    n_gpus: int | None
    network_gbps: float | None  # between nodes, where the notes state it
    setup: Setup | None
    memory_skip: str | None  # why its memory isn't scored; None where it is
    throughput_skip: str | None


def read(path: str | Path) -> list[Row]:
    """All rows of the table at ``path``.

    Raises :class:`UserError` for a file that is missing, is not CSV, lacks a column of ``NEEDED``, is empty,
    or has text where a number is due.
    """
    cells = _cells(Path(path))
    return [_row(_Cells(Path(path).name, line, row)) for line, row in cells]


def _cells(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Line number and cells of each row."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if not missing:
                rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}.", "Give a table of measurements.") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{path.name} is not a CSV file: {error}.", "Give a table of measurements.") from None
    if missing:
        some = ", ".join(missing[:5]) + (" and others" if len(missing) > 5 else "")
        raise UserError(
            f"{path.name} has no column {some}.",
            "Its first line must name the columns of a table of measurements, as data/measured.csv does.",
        )
    if not rows:
        raise UserError(f"{path.name} has no row below its header.", "Give at least one measurement.")
    for line, row in rows:
        if None in row or None in row.values():
            raise UserError(
                f"{path.name}, line {line}: it has not as many cells as the header.",
                "Quote cells that have a comma in them.",
            )
    return [(line, {key: value.strip() for key, value in row.items()}) for line, row in rows]


@dataclass(frozen=True, slots=True)
class _Cells:
    """One row's cells, read as text, numbers and flags."""

    file: str
    line: int
    values: Mapping[str, str]

    def text(self, column: str) -> str:
        value = self.values.get(column, "")
        return "" if value.lower() in ("n/a", "na", "-", "?") else value

    def number(self, column: str) -> float | None:
        text = self.values.get(column, "")
        if text.lower() in _BLANK:
            return None
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            value = -1.0
        if 0 <= value < float("inf"):
            return value
        if column in _MEASURED:
            raise UserError(
                f"{self.file}, line {self.line}: {column} = {text!r} is not a number of at least 0.",
                "Leave the cell blank where the value is unknown.",
            )
        raise Unclaimed(f"{column} = {text!r} is not a number")

    def whole(self, column: str) -> int | None:
        value = self.number(column)
        if value is not None and value != int(value):
            raise Unclaimed(f"{column} = {self.values[column]!r} is not a whole number")
        return None if value is None else int(value)

    def flag(self, column: str) -> bool | None:
        text = self.text(column).lower()
        return None if not text else text not in ("0", "0.0", "false", "no", "none", "off")


def _row(cells: _Cells) -> Row:
    measured = {column: cells.number(column) for column in _MEASURED}
    kind, memory_skip = None, None
    try:
        kind = wording.kind_of(cells.text("mem_kind"))
    except Unclaimed as reason:
        memory_skip = str(reason)
    gib = _peak(measured)
    if gib is None:
        memory_skip = memory_skip if cells.text("mem_kind") else "no memory was measured"
        memory_skip = memory_skip or "the peak is blank"
    gpu = find_gpu(cells.text("gpu"))
    throughput_skip = None
    if not measured["tps_per_gpu"]:
        throughput_skip = "no throughput was measured"
    elif gpu is None:
        throughput_skip = f"GPU {cells.text('gpu')!r} is not in the catalogue"
    setup = None
    try:
        setup = _setup(cells, gpu)
    except Unclaimed as reason:
        memory_skip, throughput_skip = memory_skip or str(reason), throughput_skip or str(reason)
    except UserError as error:
        memory_skip, throughput_skip = memory_skip or error.problem, throughput_skip or error.problem
    memory_skip = memory_skip or _unstated(cells)
    return Row(
        id=cells.text("id"),
        source=cells.text("source"),
        framework=cells.text("framework"),
        method=cells.text("method"),
        quality=cells.text("quality").upper(),
        kind=None if memory_skip else kind,
        gib=gib,
        tps_per_gpu=measured["tps_per_gpu"],
        gpu_name=cells.text("gpu"),
        gpu=gpu,
        n_gpus=None if measured["n_gpus"] is None else int(measured["n_gpus"]),
        network_gbps=_network(cells.text("notes")),
        setup=setup,
        memory_skip=memory_skip,
        throughput_skip=throughput_skip,
    )


def _peak(measured: Mapping[str, float | None]) -> float | None:
    """The measured GiB; the middle of both readings where the publication's unit may be GB or GiB."""
    peak, low, high = (measured[column] for column in ("peak_mem_GiB", "gib_min", "gib_max"))
    if peak is None and low and high:
        return (low + high) / 2
    return peak or None


def _network(notes: str) -> float | None:
    """Gbit/s between nodes, from notes such as "interconnect 400Gbps"."""
    found = re.search(r"(?:interconnect|network|fabric) (\d+) ?Gbps", notes, re.IGNORECASE)
    return float(found[1]) if found else None


def find_gpu(text: str) -> Gpu | None:
    """The catalogue's GPU for a table's name such as "A100-80GB" or "H100-96GB(HBM2e,500W)"."""
    bare = re.sub(r"\(.*?\)", "", text.split("x")[-1] if re.match(r"\d+x", text) else text).strip()
    bare = re.sub(r"^nvidia[- ]", "", bare, flags=re.IGNORECASE)
    family = re.sub(r"[-_ ]?\d+ ?(GB|G|GiB)\b", "", bare, flags=re.IGNORECASE)
    for name in (bare, bare.replace("-", " "), family, re.sub(r"(?<=RTX)(?=\d)", " ", bare), f"{family} SXM"):
        found = hardware.find_gpu_by_nvml_name(name) if name else None
        if found is not None:
            return found
    return None


# ---------------------------------------------------------------------------------------------------------
# Cells -> Setup


def _setup(cells: _Cells, gpu: Gpu | None) -> Setup:
    engine = wording.engine_of(cells.text("framework"))
    method, task, quantised, embeddings = wording.method_of(cells.text("method"))
    seq_len, micro_batch = cells.whole("seq_len"), cells.whole("micro_batch")
    if not seq_len or not micro_batch:
        raise Unclaimed("the batch or the sequence length is not stated")
    model = row_models.model_of(_dims(cells, seq_len))
    targets = wording.targets_of(cells.text("lora_targets")) or _TARGETS.get(engine, ("q_proj", "v_proj"))
    if embeddings:
        targets = tuple(name for name in targets if name not in ("embed_tokens", "lm_head"))
    loss, chunks = wording.loss_of(cells.text("loss_impl"), engine, seq_len)
    checkpointing = wording.checkpointing_of(cells.text("act_ckpt"))
    return Setup(
        model=model,
        engine=engine,
        method=method,
        task=task,
        lora_rank=cells.whole("lora_rank") or (8 if method == "full" else _RANK.get(engine, 8)),
        lora_targets=PROJECTIONS if method == "full" else targets,
        trained_modules=("embed_tokens", "lm_head") if embeddings else (),
        quantization=wording.quantization_of(cells.text("quant"), quantised),
        precision=_precision(cells, engine),
        fp8=wording.fp8_of(cells.text("compute_dtype")),
        optimizer=wording.optimizer_of(cells.text("optimizer")),
        optimizer_in_backward=bool(cells.flag("opt_in_bwd")),
        seq_len=seq_len,
        fixed_length=wording.fixed_length(cells.text("packing")),
        checkpointing=checkpointing or _CHECKPOINTING.get(engine, "none"),
        activation_offload=bool(cells.flag("act_offload")),
        compile=bool(cells.flag("compile")),
        loss=loss,
        loss_chunks=chunks,
        attention="math" if re.search("math|eager|naive", cells.text("attn").lower()) else "flash",
        **_offload(cells),
        **_parallelism(cells, engine, micro_batch, gpu),
    )


def _dims(cells: _Cells, seq_len: int) -> row_models.Dims:
    return row_models.Dims(
        name=cells.text("model"),
        parameters=cells.whole("n_params"),
        hidden=cells.whole("hidden"),
        layers=cells.whole("layers"),
        heads=cells.whole("heads"),
        kv_heads=cells.whole("kv_heads"),
        ffn=cells.whole("ffn"),
        vocab=cells.whole("vocab"),
        tied=cells.flag("tied"),
        seq_len=seq_len,
    )


def _precision(cells: _Cells, engine: Engine) -> Precision:
    """What is kept and what is computed in.

    DeepSpeed and Megatron-Core always keep fp32 master weights; torchtitan, Composer and fms-fsdp keep fp32
    shards where the table is silent; elsewhere silence means the dtype of computing.
    """
    kept, computed = cells.text("param_dtype").lower(), cells.text("compute_dtype").lower()
    method = cells.text("method").lower()
    if "fp16" in computed or "float16" in computed.replace("bfloat16", ""):
        return "fp16-autocast"
    if computed in ("fp32", "float32", "tf32"):
        return "fp32"
    if engine in ("deepspeed", "megatron"):
        return "bf16-mixed"
    if "pure" in method or "bf16" in kept or "bfloat16" in kept:
        return "bf16"
    sharded = bool(cells.text("fsdp_shard") or cells.text("zero_stage"))
    if "autocast" in computed and "autocast_adapter" not in computed:
        return "bf16-autocast"
    if "fp32" in kept or "float32" in kept or "(amp" in method or "amp" in computed:
        return "bf16-mixed" if sharded or engine in ("torchtitan", "composer") else "bf16-autocast"
    return "bf16-mixed" if engine in ("torchtitan", "composer") else "bf16"


def _offload(cells: _Cells) -> dict[str, Any]:
    text = cells.text("cpu_offload").lower()
    if text in ("", "0", "none", "false", "no"):
        return {}
    target = "nvme" if "nvme" in text else "cpu"
    weights = re.search(r"param|fsdp|all|weights|^1$|true", text)
    return {"offload": "all" if weights else "optimizer", "offload_to": target}


def _parallelism(cells: _Cells, engine: Engine, micro_batch: int, gpu: Gpu | None) -> dict[str, Any]:
    """Degrees whose product is the number of GPUs."""
    tensor, pipeline = cells.whole("tp") or 1, cells.whole("pp") or 1
    virtual, flag = cells.whole("vpp") or 1, cells.whole("sp")
    context = max(cells.whole("cp") or 1, flag if flag and flag > 1 else 1)  # a count of sp is Ulysses'
    world, sharding, shard, replicate = _data_parallel(cells, engine, tensor * pipeline, context)
    passes = _accumulation(cells, micro_batch, world // (tensor * pipeline * context) or 1)
    if engine == "torchtitan" and pipeline > 1 and passes == 1:
        # its tables state the batch of a process, which the pipeline cuts in as many pieces as it has stages
        passes = pipeline if micro_batch % pipeline == 0 else micro_batch
        micro_batch //= passes
    return {
        "micro_batch": micro_batch,
        "sharding": sharding,
        "shard": shard,
        "replicate": replicate,
        "tensor": tensor,
        "sequence_parallel": flag is None or flag > 0,
        "context": context,
        "pipeline": pipeline,
        "virtual_stages": virtual if pipeline > 1 else 1,
        "schedule": _schedule(cells, pipeline, virtual),
        "expert": cells.whole("ep") or 1,
        "accumulation": passes,
        "processes_per_node": _per_node(cells, world, gpu),
    }


def _data_parallel(
    cells: _Cells, engine: Engine, model_parallel: int, context: int
) -> tuple[int, StateSharding, int, int]:
    """GPUs in all, how states are shared among those that hold the same part of the model, and degrees."""
    said, stage = cells.whole("n_gpus"), cells.whole("zero_stage")
    shard, replicate = cells.whole("fsdp_shard"), cells.whole("dp_replicate") or 1
    if said is None and shard is None:
        raise Unclaimed("the number of GPUs is not stated")
    world = said or (shard or 1) * replicate * model_parallel * context
    rest, remainder = divmod(world, model_parallel)
    if remainder or rest < 1:
        raise Unclaimed(f"{world} GPUs can't be divided by tensor x pipeline parallel {model_parallel}")
    if engine == "deepspeed":
        return world, _zero(stage), rest if stage else 1, 1 if stage else rest
    if engine == "megatron":
        if re.search(r"\bFSDP ?= ?[1-9]", cells.text("notes")):  # Megatron-FSDP
            return world, "fsdp", rest, 1
        distributed = "dist" in cells.text("optimizer").lower()
        return (
            world,
            "zero1" if distributed else "ddp",
            rest if distributed else 1,
            1 if distributed else rest,
        )
    fsdp: StateSharding = "shard_grad_op" if stage in (1, 2) else "fsdp"
    if shard is None:
        sharded = stage is not None and stage > 0 and rest > 1
        if sharded:
            return world, fsdp, rest // replicate, replicate
        return world, "ddp" if rest > 1 else "none", 1, rest
    for degree in (shard * context, shard):  # torchtitan shares weights over context parallel as well
        if degree * replicate == rest:
            if degree == 1:
                return world, "ddp" if rest > 1 else "none", 1, rest
            return world, fsdp, degree, replicate
    raise Unclaimed(f"fsdp_shard {shard} and the other degrees do not multiply to {world} GPUs")


def _zero(stage: int | None) -> StateSharding:
    stages: tuple[StateSharding, ...] = ("zero0", "zero1", "zero2", "zero3")
    if stage is None or not 0 <= stage <= 3:
        raise Unclaimed("DeepSpeed's ZeRO stage is not stated")
    return stages[stage]


def _accumulation(cells: _Cells, micro_batch: int, data_parallel: int) -> int:
    """Forward passes a step: stated, or from a global batch ("128/mb" for each process, "GBS=512" in all)."""
    text = cells.text("grad_accum")
    if share := re.fullmatch(r"(\d+) ?/ ?mb", text):
        return max(int(share[1]) // micro_batch, 1)
    stated = cells.whole("grad_accum")
    if stated:
        return stated
    if found := re.search(r"\bGBS ?=? ?(\d+)", cells.text("notes")):
        return max(int(found[1]) // (micro_batch * data_parallel), 1)
    return 1


def _schedule(cells: _Cells, pipeline: int, virtual: int) -> Schedule:
    if pipeline == 1:
        return "none"
    said = " ".join(cells.text(column) for column in ("notes", "framework", "locator")).lower()
    if re.search(r"zero[- ]?bubble|zbv", said):
        return "zero-bubble"
    if re.search(r"gpipe|afab", said):
        return "afab"
    return "interleaved" if virtual > 1 or "interleaved" in said else "1f1b"


def _per_node(cells: _Cells, world: int, gpu: Gpu | None) -> int:
    """GPUs that fast links join; 72 in an NVL72 rack, whatever its nodes."""
    if gpu is not None and "NVL72" in gpu.interconnect:
        return min(world, 72)
    nodes = cells.whole("nodes")
    return -(-world // nodes) if nodes else min(world, 8)


def _unstated(cells: _Cells) -> str | None:
    """Why a row of less than full detail says too little for its memory; rows of quality A are precise."""
    if cells.text("quality").upper() == "A":
        return None
    full = not re.search("lora|dora", cells.text("method").lower())
    if not cells.text("act_ckpt"):
        return "activation checkpointing is not stated"
    if full and not cells.text("optimizer"):
        return "the optimizer is not stated"
    if re.search("unpacked|short samples", cells.text("packing").lower()):
        return "its samples are shorter than the sequence length, by how much is not stated"
    return None
