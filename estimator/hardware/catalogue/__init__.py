"""The hardware that plans are made for: GPUs, machines, and how both are found by name."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import date

from estimator.errors import UserError
from estimator.names import did_you_mean
from estimator.plan import GIB, MIB

# Drivers, clouds and labels give one card sizes that differ by up to 7 % (L4: 22,888 MiB, 24 GB)
SIZE_TOLERANCE = 0.1
VENDORS = frozenset({"nvidia", "geforce", "tesla", "quadro", "amd", "instinct"})  # no GPU's own words


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator. Rates are dense, without structured sparsity; raises UserError for a memory of 0."""

    name: str
    vendor: str
    vram_bytes: int  # as drivers or clouds report it; where none does, the label's GB taken as 10^9 bytes
    vram_reported: bool
    bandwidth_gbps: float | None  # memory, GB/s
    interconnect: str
    interconnect_gbps: float | None  # GB/s, both directions together
    peak_tflops: tuple[tuple[str, float], ...]  # dense, by dtype; a dtype without a figure is left out
    architecture: str | None
    compute_capability: str | None
    dtypes: tuple[str, ...]  # that its matrix units take
    form_factor: str
    aliases: tuple[str, ...]
    source: str
    notes: str
    label_gb: float | None = (
        None  # the size that the card is sold as; None where only the reported one is known
    )
    driver_bytes: int = 0  # of them, what the driver keeps from CUDA; 0 where no log says it
    # The best matrix product that was measured, in the dtype that it trains in: bf16, else fp32
    measured_tflops: float | None = None

    def __post_init__(self) -> None:
        if self.vram_bytes <= 0:
            raise UserError(f"GPU {self.name}: a memory of {self.vram_bytes} bytes is not possible.")

    def peak_flops(self, dtype: str) -> float | None:
        """Dense FLOP/s in that dtype ("bf16", "fp32"...), None where it is not sourced."""
        value = dict(self.peak_tflops).get(dtype)
        return None if value is None else value * 1e12

    @property
    def usable_bytes(self) -> int:
        """Memory available to one process, including its CUDA context; decides whether a plan fits."""
        return self.vram_bytes - self.driver_bytes

    @property
    def bf16(self) -> bool:
        """Whether its matrix units take bf16."""
        return "bf16" in self.dtypes

    @property
    def vram_gib(self) -> float:
        """Memory in GiB."""
        return self.vram_bytes / GIB

    def is_at_least(self, size: float) -> bool:
        """Whether people call it a card of ``size`` GB or more.

        By the label or by the GiB that are reported, whichever is more: an L4 is a 24 GB card, though the
        cloud reports 22.35 GiB.
        """
        return max(self.label_gb or 0.0, self.vram_gib) >= size


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One machine type: of a cloud, or of the user's own."""

    cloud: str  # lower case: "aws", "gcp"...
    name: str
    gpu: str
    gpu_count: int  # 0: only a share of one GPU, which training can't use
    vcpu: int | None
    ram_bytes: int | None
    network_gbps: float | None  # gigabits a second, of the fabric that GPUs talk over
    fabric: str
    usd_per_hour: float | None  # on demand
    spot_usd_per_hour: float | None
    region: str | None  # of the price
    price_date: str | None
    price_source: str
    source: str
    notes: str

    def price_age_days(self, today: date) -> int | None:
        """Days since the price was read; None where nothing is priced or the day is not known."""
        if self.usd_per_hour is None and self.spot_usd_per_hour is None:
            return None
        day = day_of(self.price_date)
        return None if day is None else (today - day).days


@dataclass(frozen=True, kw_only=True, slots=True)
class Catalogue:
    """GPUs and the machines that have them.

    Raises UserError where a name stands for two things or a machine has a GPU that is not listed.
    """

    gpus: tuple[Gpu, ...]
    instances: tuple[Instance, ...]
    warnings: tuple[str, ...] = ()  # what could not be used, one line each
    _gpu_index: dict[str, Gpu] = field(init=False, repr=False, compare=False)
    _instance_index: dict[str, Instance] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        gpus: dict[str, Gpu] = {}
        for item in self.gpus:
            for key in (item.name, *item.aliases):
                other = gpus.setdefault(normal(key), item)
                if other is not item:
                    raise UserError(
                        f"The GPU name {key!r} stands for two GPUs: {other.name} and {item.name}.",
                        "Take it out of one row's name or aliases.",
                    )
        machines: dict[str, Instance] = {}
        for machine in self.instances:
            if normal(machine.gpu) not in gpus:
                raise UserError(f"{machine.name} has a GPU that no table lists: {machine.gpu}.")
            if machines.setdefault(machine.name.lower(), machine) is not machine:
                raise UserError(f"There are two machine types of the name {machine.name!r}.")
        object.__setattr__(self, "_gpu_index", gpus)
        object.__setattr__(self, "_instance_index", machines)

    def find_gpu(self, name: str) -> Gpu | None:
        """The GPU that a user, a driver or a node's label calls ``name``, or None."""
        return self._gpu_index.get(normal(name))

    def gpus_called(self, name: str) -> tuple[Gpu, ...]:
        """All GPUs that a name stands for, that of this very name first: "A100" both sizes and both forms.

        A table name, or a product name of a driver or cloud, stands for its GPU alone; fewer words stand for
        every GPU that has them. Raises UserError with the nearest names where there is none.
        """
        exact, words = self.find_gpu(name), _words(name)
        if exact is not None:
            if normal(exact.name) == normal(name):
                return (exact,)
            if not words & VENDORS:  # else it is a driver's name, of this GPU alone
                aliases = [_words(alias) for alias in exact.aliases if normal(alias) == normal(name)]
                words = next((alias for alias in aliases if not alias & VENDORS), words)  # of "a10080gb"
        else:
            words -= VENDORS
        called = tuple(gpu for gpu in self.gpus if words and words <= _words_of(gpu))
        if exact is not None:
            return (exact, *(gpu for gpu in called if gpu is not exact)) if exact in called else (exact,)
        if not called:
            raise self._no_gpu(name)
        return called

    def find_gpu_of_size(self, name: str, mib: int) -> Gpu | None:
        """Return the GPU that a cloud calls ``name`` next to a memory size ("A100", 40960), or None."""
        for spelling in (f"{name}-{round(mib / 1024)}GB", name):
            gpu = self.find_gpu(spelling)
            if gpu is not None and abs(mib * MIB / gpu.vram_bytes - 1) < SIZE_TOLERANCE:
                return gpu
        return None

    def gpu(self, name: str) -> Gpu:
        """The one GPU of that name: a table name, an alias, a product name, or words that one GPU alone has.

        Raises UserError with the GPUs that an ambiguous name stands for, else with the nearest names.
        """
        gpu = self.find_gpu(name)
        if gpu is not None:
            return gpu
        called = self.gpus_called(name)
        if len(called) > 1:
            raise UserError(
                f"{name!r} stands for {len(called)} GPUs.",
                f"Name one of them: {', '.join(gpu.name for gpu in called)}.",
            )
        return called[0]

    def _no_gpu(self, name: str) -> UserError:
        spellings = {key: gpu.name for key, gpu in self._gpu_index.items()}
        return UserError(
            f"There is no GPU {name!r} in the GPU table.",
            did_you_mean(normal(name), spellings, 4, shown=spellings)
            or "`finetune gpus` lists them; --hardware FILE adds one.",
        )

    def find_instance(self, name: str | None) -> Instance | None:
        """The machine type of that name, in any case of letters; None where there is none."""
        return self._instance_index.get((name or "").strip().lower())

    def instance(self, name: str) -> Instance:
        """The machine type of that name; raises UserError with the nearest names."""
        instance = self.find_instance(name)
        if instance is None:
            raise UserError(
                f"There is no instance type {name!r} in the instance table.",
                did_you_mean(name, [item.name for item in self._instance_index.values()]),
            )
        return instance

    def clouds(self) -> tuple[str, ...]:
        """The clouds that have a machine, in the table's order."""
        return tuple(dict.fromkeys(item.cloud for item in self.instances))

    def cloud(self, name: str) -> str:
        """Return the cloud's name as the table spells it; raises UserError that lists the known ones."""
        if name.strip().lower() not in self.clouds():
            raise UserError(
                f"There is no cloud {name!r} in the instance table.", f"It has {', '.join(self.clouds())}."
            )
        return name.strip().lower()

    def architectures(self) -> tuple[str, ...]:
        """The architectures of the GPUs, in the table's order."""
        return tuple(dict.fromkeys(item.architecture for item in self.gpus if item.architecture))

    def architecture(self, name: str) -> tuple[str, ...]:
        """The architectures whose names begin with ``name`` ("ada": Ada Lovelace); else UserError."""
        matches = tuple(item for item in self.architectures() if normal(name) and fits(item, name))
        if not matches:
            raise UserError(
                f"There is no architecture {name!r} in the GPU table.",
                f"It has {', '.join(self.architectures())}.",
            )
        return matches


def fits(architecture: str, name: str) -> bool:
    """Whether an architecture's name begins with ``name``, case and punctuation aside."""
    return normal(architecture).startswith(normal(name))


def normal(name: str) -> str:
    """A product's name as a key: letters and digits only, lower case, without the vendor."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removeprefix("nvidia")


def _words(name: str) -> frozenset[str]:
    """A name's words and figures, lower case; "RTX4090" is two."""
    return frozenset(re.findall(r"[a-z0-9]+", re.sub(r"(?<=rtx)(?=\d)", " ", name.lower())))


def _words_of(gpu: Gpu) -> frozenset[str]:
    """The words that people call a GPU by: its table name's, and its size."""
    return _words(gpu.name) if gpu.label_gb is None else _words(f"{gpu.name} {gpu.label_gb:g}GB")


def day_of(text: str | None) -> date | None:
    """The day that a price's date begins with; None where it gives a year only, or is None."""
    if text is None or not re.match(r"\d{4}-\d{2}-\d{2}", text):
        return None
    try:
        return date.fromisoformat(text[:10])
    except ValueError:
        return None
