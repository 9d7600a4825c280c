"""GPUs and instance types, and their lookup by name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from datetime import date

from estimator.errors import UserError
from estimator.hardware.catalogue.parts import ALL_SLICES, parse, replica_name, slice_name
from estimator.names import did_you_mean
from estimator.option_checks import check_type
from estimator.plan import GIB, MIB

# Drivers, clouds and labels report sizes of a card that differ by up to 7 % (L4: 22,888 MiB, 24 GB)
SIZE_TOLERANCE = 0.1
_GPU_NAMES = "Give a name, such as H100 SXM; `finetune gpus` lists all."
VENDORS = frozenset(
    {"nvidia", "geforce", "tesla", "quadro", "amd", "instinct"}
)  # words in names of many GPUs


OTHER_ACCELERATORS = frozenset(
    ("apple", "arc", "ascend", "gaudi", "gaudi2", "gaudi3", "inferentia", "intel", "mps", "tpu", "trainium")
).union(f"m{generation}" for generation in range(1, 6))  # words in names of accelerators without CUDA


# Reported memory minus CUDA's total is at most this much and this share of GPUs for which the table has both
MOST_DRIVER_BYTES = int(1.2 * 2**30)
MOST_DRIVER_SHARE = 0.025


def most_driver_bytes(reported_bytes: int) -> int:
    """Return what a driver reserves at most of a GPU's reported memory, for GPUs of unknown CUDA total."""
    return min(MOST_DRIVER_BYTES, math.ceil(reported_bytes * MOST_DRIVER_SHARE))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU model. Rates are dense, without structured sparsity. Raises UserError for a memory of 0."""

    name: str
    vendor: str
    vram_bytes: int  # as reported by drivers or clouds, otherwise the marketed GB as 10^9 bytes
    vram_reported: bool
    bandwidth_gbps: float | None  # memory, GB/s
    interconnect: str
    interconnect_gbps: float | None  # GB/s, both directions together
    peak_tflops: tuple[tuple[str, float], ...]  # dense, by dtype; unknown ones are omitted
    architecture: str | None
    compute_capability: str | None
    dtypes: tuple[str, ...]  # supported by its matrix units
    form_factor: str
    aliases: tuple[str, ...]
    source: str
    notes: str
    label_gb: float | None = None  # marketed size; None if only the reported size is known
    driver_bytes: int | None = 0  # part that the driver reserves; None if unknown
    # Best measured matrix product, in its training dtype: bf16, otherwise fp32
    measured_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.vram_bytes <= 0:
            raise UserError(f"GPU {self.name}: a memory of {self.vram_bytes} bytes is not possible.")

    def peak_flops(self, dtype: str) -> float | None:
        """Return dense FLOP/s in a dtype ("bf16", "fp32"...), or None if unknown."""
        value = dict(self.peak_tflops).get(dtype)
        return None if value is None else value * 1e12

    @property
    def usable_bytes(self) -> int:
        """Memory available to one process, including its CUDA context; decides whether a plan fits."""
        reserved = most_driver_bytes(self.vram_bytes) if self.driver_bytes is None else self.driver_bytes
        return self.vram_bytes - reserved

    @property
    def bf16(self) -> bool:
        """Whether its matrix units support bf16."""
        return "bf16" in self.dtypes

    @property
    def vram_gib(self) -> float:
        """Memory in GiB."""
        return self.vram_bytes / GIB

    def has_memory_gb(self, size: float) -> bool:
        """Return whether the card has ``size`` GB or more, by the larger of marketed GB and reported GiB.

        An L4 is a 24 GB card, although the cloud reports 22.35 GiB.
        """
        return max(self.label_gb or 0.0, self.vram_gib) >= size


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One instance type: of a cloud, or defined by the user."""

    cloud: str  # lower case: "aws", "gcp"...
    name: str
    gpu: str
    gpu_count: int  # 0: only a share of one GPU, which training cannot use
    vcpu: int | None
    ram_bytes: int | None
    network_gbps: float | None  # Gbit/s of the network between GPUs
    fabric: str
    usd_per_hour: float | None  # on demand
    spot_usd_per_hour: float | None
    region: str | None  # of the price
    price_date: str | None
    price_source: str
    source: str
    notes: str

    @property
    def price_day(self) -> str:
        """Day or year of the price, without its note; "" if unknown."""
        return (self.price_date or "").partition(" (")[0]

    @property
    def price_region(self) -> str:
        """Region of the price; "" if unknown."""
        return "all regions" if self.region == "all" else self.region or ""

    def price_age_days(self, today: date) -> int | None:
        """Return the days since the price was read; None without a price or date."""
        if self.usd_per_hour is None and self.spot_usd_per_hour is None:
            return None
        day = day_of(self.price_date)
        return None if day is None else (today - day).days


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """GPUs and the instance types with them.

    Raises UserError for a duplicate name, and for an instance type with an unknown GPU.
    """

    gpus: tuple[Gpu, ...]
    instances: tuple[Instance, ...]
    warnings: tuple[str, ...] = ()  # one line each
    _gpu_index: dict[str, Gpu] = field(init=False, repr=False, compare=False)
    _instance_index: dict[str, Instance] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gpus: dict[str, Gpu] = {}
        for item in self.gpus:
            for key in (item.name, *item.aliases):
                existing = gpus.setdefault(normalize(key), item)
                if existing is not item:
                    raise UserError(
                        f"The GPU name {key!r} refers to two GPUs: {existing.name} and {item.name}.",
                        "Remove it from the name or the aliases of one row.",
                    )
        machines: dict[str, Instance] = {}
        for machine in self.instances:
            if normalize(machine.gpu) not in gpus:
                raise UserError(f"{machine.name} has an unknown GPU: {machine.gpu}.")
            if machines.setdefault(machine.name.lower(), machine) is not machine:
                raise UserError(f"There are two machine types of the name {machine.name!r}.")
        object.__setattr__(self, "_gpu_index", gpus)
        object.__setattr__(self, "_instance_index", machines)

    def find_gpu(self, name: str) -> Gpu | None:
        """Return the GPU that a user, a driver or a node label calls ``name``, or None.

        Slices and replicas are found by the names of :mod:`estimator.hardware.catalogue.parts`.
        """
        return self._gpu_index.get(normalize(name)) or self._find_part(name)

    def gpus_called(self, name: str) -> tuple[Gpu, ...]:
        """Return all GPUs that match a name, an exact match first; "A100": both sizes and form factors.

        A name in the table, or a product name of a driver or cloud, matches its GPU only; fewer words match
        every GPU with these words. Raises UserError with similar names if none matches.
        """
        check_type("GPU", name, str, _GPU_NAMES)
        exact, words = self.find_gpu(name), _words(name)
        if exact is not None:
            if normalize(exact.name) == normalize(name):
                return (exact,)
            if not words & VENDORS:  # otherwise a name of a driver, for this GPU only
                aliases = [_words(alias) for alias in exact.aliases if normalize(alias) == normalize(name)]
                words = next(
                    (alias for alias in aliases if not alias & VENDORS), words
                )  # "a10080gb" has the words of its alias
        else:
            words -= VENDORS
        matches = tuple(gpu for gpu in self.gpus if words and words <= _words_of(gpu))
        if exact is not None:
            return (exact, *(gpu for gpu in matches if gpu is not exact)) if exact in matches else (exact,)
        if not matches:
            raise self._no_gpu(name)
        return matches

    def _find_part(self, name: str) -> Gpu | None:
        """Return the MIG slice or replica of this name, or None."""
        values = parse(name)
        gpu = self.find_gpu(values["gpu"]) if values else None
        if gpu is None:
            return None
        if "profile" in values:
            # Drivers report a few percent more than the decimal gigabytes of a profile's name
            part, size = slice_name(gpu.name, values["profile"]), int(values["gb"]) * 10**9
            share = min(int(values["slices"]), ALL_SLICES) / ALL_SLICES
        else:
            replicas = max(int(values["replicas"]), 1)
            part, size = replica_name(gpu.name, replicas), gpu.usable_bytes // replicas
            share = 1 / replicas
        bandwidth, measured_tflops = gpu.bandwidth_gbps, gpu.measured_tflops
        return replace(
            gpu,
            name=part,
            vram_bytes=size,
            vram_reported=False,
            driver_bytes=0,
            label_gb=None,
            bandwidth_gbps=None if bandwidth is None else bandwidth * min(size / gpu.vram_bytes, 1.0),
            interconnect="none",
            interconnect_gbps=None,
            peak_tflops=tuple((dtype, rate * share) for dtype, rate in gpu.peak_tflops),
            measured_tflops=None if measured_tflops is None else measured_tflops * share,
            aliases=(),
        )

    def find_gpu_of_size(self, name: str, mib: int) -> Gpu | None:
        """Return the GPU that a cloud calls ``name`` next to a memory size ("A100", 40960), or None."""
        for alias in (f"{name}-{round(mib / 1024)}GB", name):
            gpu = self.find_gpu(alias)
            if gpu is not None and abs(mib * MIB / gpu.vram_bytes - 1) < SIZE_TOLERANCE:
                return gpu
        return None

    def gpu(self, name: str) -> Gpu:
        """Return the GPU of a name: in the table, an alias, a product name, or words that match one GPU only.

        Raises UserError with the matching GPUs of an ambiguous name, or names similar to an unknown one.
        """
        check_type("GPU", name, str, _GPU_NAMES)
        gpu = self.find_gpu(name)
        if gpu is not None:
            return gpu
        matches = self.gpus_called(name)
        if len(matches) > 1:
            raise UserError(
                f"{name!r} matches {len(matches)} GPUs.",
                f"Name one of them: {', '.join(gpu.name for gpu in matches)}.",
            )
        return matches[0]

    def _no_gpu(self, name: str) -> UserError:
        words = _words(name)
        if words & OTHER_ACCELERATORS and not words & {"nvidia", "tesla"}:  # there is a Tesla M4
            return UserError(
                f"{name!r} is not an NVIDIA GPU.",
                "Choose an NVIDIA GPU: the engines are tested with CUDA only.",
            )
        spellings = {key: gpu.name for key, gpu in self._gpu_index.items()}
        similar = did_you_mean(normalize(name), spellings, 4, shown=spellings)
        return UserError(
            f"There is no GPU {name!r} in the GPU table.",
            f"{similar} `finetune gpus` lists all; --hardware FILE adds one.".strip(),
        )

    def find_instance(self, name: str | None) -> Instance | None:
        """Return the instance type of this name (case-insensitive), or None."""
        return self._instance_index.get((name or "").strip().lower())

    def instance(self, name: str) -> Instance:
        """Return the instance type of this name. Raises UserError with similar names for an unknown one."""
        check_type("instance type", name, str, "Give a name, such as p5.48xlarge.")
        instance = self.find_instance(name)
        if instance is None:
            raise UserError(
                f"There is no instance type {name!r} in the instance table.",
                did_you_mean(name, [item.name for item in self._instance_index.values()]),
            )
        return instance

    def clouds(self) -> tuple[str, ...]:
        """Return the clouds with an instance type, in table order."""
        return tuple(dict.fromkeys(item.cloud for item in self.instances))

    def cloud(self, name: str) -> str:
        """Return the name of a cloud as in the table. Raises UserError that lists the known ones."""
        check_type("cloud", name, str, f"Give one of {', '.join(self.clouds())}.")
        if name.strip().lower() not in self.clouds():
            raise UserError(
                f"There is no cloud {name!r} in the instance table.", f"It has {', '.join(self.clouds())}."
            )
        return name.strip().lower()

    def architectures(self) -> tuple[str, ...]:
        """Return the architectures of the GPUs, in table order."""
        return tuple(dict.fromkeys(item.architecture for item in self.gpus if item.architecture))

    def architecture(self, name: str) -> tuple[str, ...]:
        """Return the architectures that begin with ``name`` ("ada": Ada Lovelace), or raise UserError."""
        matches = tuple(
            item for item in self.architectures() if normalize(name) and matches_prefix(item, name)
        )
        if not matches:
            raise UserError(
                f"There is no architecture {name!r} in the GPU table.",
                f"It has {', '.join(self.architectures())}.",
            )
        return matches


def matches_prefix(architecture: str, name: str) -> bool:
    """Return whether an architecture's name begins with ``name``, ignoring case and punctuation."""
    return normalize(architecture).startswith(normalize(name))


def normalize(name: str) -> str:
    """Normalize a product name: letters and digits only, lower case, without the vendor."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def _words(name: str) -> frozenset[str]:
    """Split a name into words and numbers in lower case; "RTX4090" has two."""
    return frozenset(re.findall(r"[a-z0-9]+", re.sub(r"(?<=rtx)(?=\d)", " ", name.lower())))


def _words_of(gpu: Gpu) -> frozenset[str]:
    """Return the words of a GPU's name in the table, and its size."""
    return _words(gpu.name) if gpu.label_gb is None else _words(f"{gpu.name} {gpu.label_gb:g}GB")


def day_of(text: str | None) -> date | None:
    """Parse the day at the beginning of a price's date; None for a year only, or None."""
    if text is None or not re.match(r"\d{4}-\d{2}-\d{2}", text):
        return None
    try:
        return date.fromisoformat(text[:10])
    except ValueError:
        return None
