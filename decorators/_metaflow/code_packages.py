"""Content of the code package that a run uploads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from metaflow.packaging_sys import distribution_support
from metaflow.packaging_sys.v1 import MetaflowCodeContentV1


def exclude_bytecode() -> None:
    """Exclude the ``.pyc`` files of installed packages from the code package. Called in the launching
    process.

    pip lists the bytecode it compiles in a package's RECORD, and Metaflow packs every listed file. Bytecode
    is larger than the sources and fits only one Python version, which may differ from the containers'.
    """
    if distribution_support._cached_distributions is None:
        distribution_support._cached_distributions = _Distributions()
    if not hasattr(MetaflowCodeContentV1._module_files, "__wrapped__"):
        MetaflowCodeContentV1._module_files = _without_bytecode(MetaflowCodeContentV1._module_files)


class _Distributions(dict[str, list[metadata.Distribution]]):
    """Installed distributions by top-level module, looked up by text.

    Metaflow parses the file lists of all distributions instead: half a second of a core where torch is
    installed, in every launch with one of our packages.
    """

    def __missing__(self, name: str) -> list[metadata.Distribution]:
        self[name] = [item for item in metadata.distributions() if _contains(item, name)]
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ARG002 - as that of a dictionary
        """Return the distributions that contribute to a module."""
        return self[name]


def _contains(distribution: metadata.Distribution, name: str) -> bool:
    declared = (distribution.read_text("top_level.txt") or "").split()
    if declared:
        return name in declared
    record = distribution.read_text("RECORD") or ""
    return record.startswith(f"{name}/") or f"\n{name}/" in record or f"\n{name}.py," in record


def _without_bytecode(original: Callable[..., Iterator[tuple[str, str]]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def files(self: Any, name: str, paths: set[str]) -> Iterator[tuple[str, str]]:
        return (pair for pair in original(self, name, paths) if not pair[0].endswith(".pyc"))

    return files
