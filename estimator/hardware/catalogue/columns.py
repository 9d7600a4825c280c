"""Columns of the hardware tables: valid values, and hints for invalid ones."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of a hardware table that accepts any text; subclasses use ``rule`` and ``hint``."""

    rule: str = ""  # description of valid values
    hint: str = ""  # default advice for invalid values

    def fault(self, text: str) -> tuple[str, str] | None:  # noqa: ARG002 - any text is fine
        """Return the problem of a cell and its fix; None if the cell is valid."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Number(Column):
    """A number from ``low`` to ``high`` in ``unit``; ``other_pattern`` matches other valid texts.

    The limits are beyond existing values, so that a number in a wrong unit is out of range.
    """

    unit: str
    low: float
    high: float
    low_hint: str = ""
    high_hint: str = ""
    whole: bool = False
    other_pattern: str = ""  # pattern of other valid texts

    def fault(self, text: str) -> tuple[str, str] | None:
        """Return (problem, fix) of a cell without a number in range; the fix names the probable unit."""
        if self.other_pattern and re.fullmatch(self.other_pattern, text):
            return None
        kind = "whole number" if self.whole else "number"
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or "_" in text or (self.whole and value != int(value)):
            return f"is not a {kind}", f"Write the {self.unit} as a {kind} only, such as {self.low:g}."
        if self.low <= value <= self.high:
            return None
        hint = self.high_hint if value > self.high else self.low_hint if value > 0 or self.low == 0 else ""
        return f"is not possible: it takes {self.low:g} to {self.high:g} {self.unit}", hint


@dataclass(frozen=True, kw_only=True, slots=True)
class Words(Column):
    """Words of the set ``allowed``, separated by spaces; ``single``: one value, which may contain spaces."""

    allowed: frozenset[str]
    single: bool = False

    def fault(self, text: str) -> tuple[str, str] | None:
        """Return (problem, fix) of a cell with an unknown word."""
        values = [text] if self.single else text.split()
        invalid = [value for value in values if value.lower() not in self.allowed]
        if not invalid:
            return None
        return f"is not known: {invalid[0]}", f"It takes {', '.join(sorted(self.allowed))}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern(Column):
    """A text that fully matches the regular expression ``pattern``."""

    pattern: str

    def fault(self, text: str) -> tuple[str, str] | None:
        """Return (problem, fix) of a cell that does not match the pattern."""
        return None if re.fullmatch(self.pattern, text) else (f"is not {self.rule}", self.hint)


@dataclass(frozen=True, kw_only=True, slots=True)
class Day(Column):
    """A date (YYYY, YYYY-MM or YYYY-MM-DD, and words after it) that is not in the future."""

    def fault(self, text: str) -> tuple[str, str] | None:
        """Return (problem, fix) of a cell that is no date or in the future."""
        advice = "Write it as YYYY-MM-DD."
        if not re.match(r"\d{4}(-\d\d(-\d\d)?)?(?![\d-])", text):
            return "is not a date", advice
        try:
            day = date.fromisoformat((text[:10] + "-01-01")[:10] if text[4:5] == "-" else f"{text[:4]}-01-01")
        except ValueError:
            return "is not a date", advice
        if day > date.today() + timedelta(days=1):  # allow for time zones
            return "is in the future", "Write the day on which the price was read."
        return None


TEXT = Column()


def rate() -> Number:
    """Build a column of dense TFLOPS."""
    return Number(
        unit="TFLOPS",
        low=1,
        high=50_000,
        low_hint="It looks like PFLOPS: give TFLOPS, dense.",
        high_hint="It looks like GFLOPS: give TFLOPS, dense.",
    )


def usd() -> Number:
    """Build a column of USD per hour, for a complete instance."""
    return Number(
        unit="USD per hour",
        low=0,
        high=1000,
        low_hint="A price cannot be negative; leave the cell blank if there is none.",
        high_hint="It may be per month or in cents: give USD per hour, for the complete instance.",
    )


DTYPES = frozenset({"fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "cfp8", "fp6", "fp4", "int8", "int4"})

GPU: Mapping[str, Column] = {
    "gpu": TEXT,
    "vendor": Words(allowed=frozenset({"nvidia", "amd", "aws", "intel", "google"}), single=True),
    "vram_GB": Number(
        unit="GB",
        low=1,
        high=2000,
        other_pattern=r"\d+ or \d+",
        low_hint="It looks like TB: give GB.",
        high_hint="It looks like MiB: put it under vram_reported_MiB.",
    ),
    "vram_reported_MiB": Number(
        unit="MiB",
        low=1000,
        high=2_000_000,
        low_hint="It looks like GB or GiB: put the label's GB under vram_GB, or multiply GiB by 1024.",
        high_hint="It looks like KiB or bytes: give MiB.",
    ),
    "vram_cuda_GiB": Number(
        unit="GiB",
        low=1,
        high=2000,
        low_hint="It looks like TiB: give GiB.",
        high_hint="It looks like MiB: divide it by 1024.",
    ),
    "mem_bw_GBps": Number(
        unit="GB/s",
        low=50,
        high=50_000,
        low_hint="It looks like TB/s: multiply it by 1000.",
        high_hint="It looks like MB/s: divide it by 1000.",
    ),
    "interconnect": TEXT,
    "interconnect_GBps_bidir": Number(
        unit="GB/s, both directions together",
        low=4,
        high=10_000,
        low_hint="It looks like TB/s: multiply it by 1000.",
        high_hint="It looks like MB/s: divide it by 1000.",
    ),
    "bf16_TFLOPS_dense": rate(),
    "fp16_TFLOPS_dense": rate(),
    "fp8_TFLOPS_dense": rate(),
    "tf32_TFLOPS_dense": rate(),
    "fp32_TFLOPS": rate(),
    "matmul_TFLOPS_measured": rate(),
    "architecture": TEXT,
    "compute_capability": Pattern(
        pattern=r"\d+\.\d",
        rule="a compute capability",
        hint="Write it as 9.0; leave it blank for other vendors.",
    ),
    "tensor_dtypes": Words(allowed=DTYPES),
    "form_factor": TEXT,
    "gpus_per_server_typical": TEXT,
    "source": TEXT,
    "notes": TEXT,
    "aliases": TEXT,
}

INSTANCE: Mapping[str, Column] = {
    "cloud": TEXT,
    "instance_type": TEXT,
    "gpu": TEXT,
    "gpu_count": Number(unit="GPUs", low=1, high=128, whole=True, other_pattern=r"1/\d+"),
    "vram_total_GB": Number(
        unit="GB", low=1, high=100_000, low_hint="It looks like TB: give GB.", high_hint="It looks like MiB."
    ),
    "vcpu": Number(unit="vCPUs", low=1, high=4096, whole=True),
    "ram_GiB": Number(
        unit="GiB",
        low=1,
        high=65_536,
        low_hint="It looks like TiB: multiply it by 1024.",
        high_hint="It looks like MiB: divide it by 1024.",
    ),
    "network_Gbps": Number(
        unit="gigabits a second",
        low=0.1,
        high=100_000,
        low_hint="It looks like terabits: multiply it by 1000.",
        high_hint="It looks like megabits: divide it by 1000.",
    ),
    "fabric": TEXT,
    "on_demand_usd_h": usd(),
    "spot_usd_h": usd(),
    "price_region": TEXT,
    "price_date": Day(),
    "price_source": TEXT,
    "spec_source": TEXT,
    "notes": TEXT,
}
UNITS = (
    *("GiB", "GB", "MiB", "MB", "TiB", "TB", "KiB", "bytes"),
    *("GBps", "GiBps", "TBps", "MBps", "Gbps", "Mbps", "Tbps"),
    *("TFLOPS", "PFLOPS", "GFLOPS"),
    *("usd_h", "eur_h", "usd_month", "usd"),
)
UNIT = re.compile(rf"_(?:{'|'.join(UNITS)})(?=_|$)", re.IGNORECASE)


def stem(name: str) -> str:
    """Return the name of a column without its unit, in lower case."""
    return UNIT.sub("", name).lower()
