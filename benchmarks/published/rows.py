"""Tables of published measurements: each row with a Setup to predict, or the reason why none exists.

The columns are those of ``data/measured.csv``; a blank cell is unknown. No rule depends on a row's source.
``cells`` reads the file, ``vocabulary`` translates the terms of tables, ``row_models`` finds the model, and
``row_setups`` builds the setup.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published import cells as table_cells
from benchmarks.published import vocabulary
from benchmarks.published.cells import MEASURED, Cells
from benchmarks.published.row_setups import setup_of
from benchmarks.published.vocabulary import Kind, UnsupportedRow
from estimator import hardware
from estimator.errors import UserError
from estimator.hardware import Gpu
from estimator.memory import residuals
from estimator.plan import GIB
from estimator.setup import Setup

TABLE = Path(__file__).parent / "data" / "measured.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """One published measurement. If ``setup`` is None, each ``*_skip`` is the reason."""

    id: str
    source: str
    framework: str
    method: str
    quality: str
    kind: Kind | None  # of memory; None if it cannot be scored
    gib: float | None  # measured peak, GiB on one GPU
    tps_per_gpu: float | None  # tokens/s of one GPU
    gpu_name: str  # as the table writes it
    gpu: Gpu | None  # of the catalogue
    n_gpus: int | None
    network_gbps: float | None  # between nodes, where the notes state it
    setup: Setup | None
    oom: bool  # it ran out of memory
    capacity_bytes: int | None  # of one GPU: from the catalogue, else from the row
    alias: str | None  # engine that approximates the framework; None if the framework is that engine
    memory_skip: str | None  # reason why its memory isn't scored; None if it is
    throughput_skip: str | None
    verdict_skip: str | None  # reason why it isn't judged whether it fits; None if it is

    @property
    def varies(self) -> bool:
        """Whether its batches have varying lengths that affect the allocator; False if unknown."""
        return self.setup is not None and residuals.varies(self.setup)


def read(path: str | Path) -> list[PublishedRow]:
    """Read all rows of the table at ``path``.

    Raises :class:`UserError` for a file that is missing, is not CSV, lacks a column that is needed, is empty,
    or has text in place of a number.
    """
    return [_row(cells) for cells in table_cells.read(Path(path))]


def _row(cells: Cells) -> PublishedRow:
    measured = {column: cells.number(column) for column in MEASURED}
    kind, memory_skip = None, None
    try:
        kind = vocabulary.kind_of(cells.text("mem_kind"))
    except UnsupportedRow as reason:
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
    elif "ambiguous" in cells.text("tps_derived"):
        throughput_skip = "tokens/s of one GPU or of all: the publication doesn't say"
    elif re.search("gptq|awq|hqq", cells.text("quant").lower()):
        throughput_skip = "kernels of such 4-bit weights unpack them at a speed of their own"
    elif "slow PCIe" in cells.text("notes"):
        throughput_skip = "the publication states that its links are slower than the GPU's, not their rate"
    elif "known regression" in cells.text("notes"):
        throughput_skip = "the publication states a regression in this release"
    elif "short samples" in cells.text("packing"):
        throughput_skip = "its samples are shorter than the sequence length, by how much is not stated"
    setup, unread = None, None
    try:
        setup = setup_of(cells, gpu)
    except UnsupportedRow as reason:
        unread = str(reason)
    except UserError as error:
        unread = error.problem
    memory_skip, throughput_skip = memory_skip or unread, throughput_skip or unread
    unstated = _unstated(cells)
    memory_skip = memory_skip or unstated
    capacity = _capacity(gpu, cells)
    return PublishedRow(
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
        oom=bool(cells.flag("oom")),
        capacity_bytes=capacity,
        alias=vocabulary.alias_of(cells.text("framework")),
        memory_skip=memory_skip,
        throughput_skip=throughput_skip,
        verdict_skip=unread or _no_run(cells) or unstated or (None if capacity else "the GPU is not stated"),
    )


def _capacity(gpu: Gpu | None, cells: Cells) -> int | None:
    """Return memory of one GPU: usable bytes of the catalogue, or the row's figure, whose "GB" are GiB."""
    if gpu is not None:
        return gpu.usable_bytes
    stated = cells.number("gpu_mem_GB")
    return None if not stated else int(stated * GIB)


def _no_run(cells: Cells) -> str | None:
    """Return the reason why the row isn't a run that fitted or ran out of memory, or None."""
    if "estimate" in cells.text("mem_kind").lower():
        return "an estimate, not a run"
    if "same run as" in cells.text("notes").lower():
        return "another figure of a run that has a row already"
    if "inconsistent" in cells.text("notes").lower():
        return "the publication contradicts itself"
    if not cells.text("act_ckpt") and not cells.text("mem_kind"):
        return "activation checkpointing is not stated"
    return None


def _peak(measured: Mapping[str, float | None]) -> float | None:
    """Return the measured GiB; the mean of both readings if the publication's unit may be GB or GiB."""
    peak, low, high = (measured[column] for column in ("peak_mem_GiB", "gib_min", "gib_max"))
    if peak is None and low and high:
        return (low + high) / 2
    return peak or None


def _network(notes: str) -> float | None:
    """Parse Gbit/s between nodes from notes such as "interconnect 400Gbps"."""
    match = re.search(r"(?:interconnect|network|fabric) (\d+) ?Gbps", notes, re.IGNORECASE)
    return float(match[1]) if match else None


def find_gpu(text: str) -> Gpu | None:
    """Find the catalogue's GPU for a name such as "A100-80GB" or "H100-96GB(HBM2e,500W)"."""
    bare = re.sub(r"\(.*?\)", "", text.split("x")[-1] if re.match(r"\d+x", text) else text).strip()
    bare = re.sub(r"^nvidia[- ]", "", bare, flags=re.IGNORECASE)
    family = re.sub(r"[-_ ]?\d+ ?(GB|G|GiB)\b", "", bare, flags=re.IGNORECASE)
    for name in (
        text,
        bare,
        bare.replace("-", " "),
        family,
        re.sub(r"(?<=RTX)(?=\d)", " ", bare),
        f"{family} SXM",
    ):
        gpu = hardware.find_gpu_by_nvml_name(name) if name else None
        if gpu is not None:
            return gpu
    return None


def _unstated(cells: Cells) -> str | None:
    """Return what is missing to score a row's memory, or None; rows of quality A are complete."""
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
