"""List of probes, in the order in which their lines are shown."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from estimator.vocabulary import LAUNCHED_ENGINES
from flows.doctor.line import Line

# Seconds. Imports of torch and what is built on it read thousands of files, slowly from a network disk.
QUICK_S, ASKS_S, IMPORTS_S = 20.0, 45.0, 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """One probe function of this package, and its arguments."""

    name: str
    section: str
    function: str  # "module:function"
    limit_s: float
    arguments: tuple[str, ...] = ()  # names of its checks

    def run(self) -> list[Line]:
        """Return the probe's lines, run in this process. Raises the function's exceptions."""
        module, _, function = self.function.partition(":")
        lines: list[Line] = getattr(import_module(module), function)(*self.arguments)
        return lines


def _probe(section: str, name: str, function: str, limit_s: float, *arguments: str) -> Probe:
    where = f"flows.doctor.{function}"
    return Probe(name=name, section=section, function=where, limit_s=limit_s, arguments=arguments)


# Nothing here imports more than the command line needs
PROBES = (
    _probe("Installed", "packages", "installed:packages", QUICK_S),
    _probe("Installed", "extras", "installed:extras", QUICK_S),
    _probe("Machine", "GPU", "machine:gpus", QUICK_S),
    _probe("Machine", "torch", "machine:torch", IMPORTS_S),
    _probe("Engines", "engines", "engines:engines_of", IMPORTS_S, *LAUNCHED_ENGINES),
    _probe("Metaflow", "profile", "configuration:profile", QUICK_S),
    _probe("Metaflow", "datastore", "configuration:datastore", ASKS_S),
    _probe("Metaflow", "metadata", "configuration:metadata", QUICK_S),
    _probe("Backends", "local", "local:default_job", ASKS_S),
    _probe("Backends", "kubernetes", "clusters:kubernetes", ASKS_S),
    _probe("Backends", "batch", "clusters:batch", ASKS_S),
    _probe("Backends", "slurm", "clusters:slurm", QUICK_S),
    _probe("Tokens", "tokens", "tokens:tokens", QUICK_S),
)
