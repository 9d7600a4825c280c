"""Description of the machine of a measurement, without its name or owner."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from estimator.hardware.local_machine import detect


def describe() -> dict[str, Any]:
    machine = detect()
    packages = {name: _version(name) for name in ("torch", "torchtune", "deepspeed", "metaflow")}
    gpus = ", ".join(name for name, _ in machine.gpus) or "no GPU"
    return {
        "processor": _processor(),
        "cores": machine.cpu_cores,
        "memory_gib": round(machine.ram_bytes / 2**30, 1),
        "gpus": [name for name, _ in machine.gpus],
        "python": platform.python_version(),
        "packages": packages,
        "text": f"on {_processor()}, {machine.cpu_cores} cores, {machine.ram_bytes / 2**30:.0f} GiB, {gpus}, "
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {number}" for name, number in packages.items()),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
