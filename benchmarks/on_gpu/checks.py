"""Run ``python -m checklist`` on this machine: its GPUs, its software, NCCL (gloo on CPUs)."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from checklist import result
from estimator.errors import UserError

PROCESSES_ON_CPU = 2  # minimum for a collective between processes
VERSIONS = ("driver", "cuda", "nccl", "torch")
LEFT_OUT = "datastore,storage"
LONGEST_PROBLEM = 300  # characters of the message that are shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """Result of the checklist, or the reason why it is missing."""

    command: str
    answer: result.Result | None = None
    problem: str = ""

    @property
    def versions(self) -> dict[str, str]:
        """Known versions of the software that affects memory and speed (``VERSIONS``)."""
        facts = self.answer.measurements.facts if self.answer else ()
        parts = facts[0].versions if facts else {}
        return {name: value for name in VERSIONS if (value := parts.get(name))}


def check(device: str, gpus: int, folder: Path, limit_s: float) -> Checked:
    """Run the checklist on this machine as one node; a failure is returned, never raised."""
    file = folder / "checklist.json"
    ranks = gpus or PROCESSES_ON_CPU
    options = ["--nodes", "1", "--gpus-per-node", str(ranks), "--device", device, "--skip", LEFT_OUT]
    shown = " ".join(["python -m checklist", *options])
    command = [sys.executable, "-m", "checklist", *options, "--json", str(file)]
    with (folder / "checklist.log").open("wb") as log:
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Checked(command=shown, problem=f"it had not ended after {limit_s:.0f} s")
    if not file.is_file():  # the log has the reason
        output = (folder / "checklist.log").read_text(errors="replace").split()
        return Checked(command=shown, problem=" ".join(output)[-LONGEST_PROBLEM:] or "it said nothing")
    try:
        return Checked(command=shown, answer=result.read(file))
    except UserError as error:
        return Checked(command=shown, problem=error.problem)
