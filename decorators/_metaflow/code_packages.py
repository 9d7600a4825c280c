"""Content of the code package that a run uploads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from metaflow.packaging_sys.v1 import MetaflowCodeContentV1


def exclude_bytecode() -> None:
    """Exclude the ``.pyc`` files of installed packages from the code package. Called in the launching
    process.

    pip lists the bytecode it compiles in a package's RECORD, and Metaflow packs every listed file. Bytecode
    is larger than the sources and fits only one Python version, which may differ from the containers'.
    """
    if not hasattr(MetaflowCodeContentV1._module_files, "__wrapped__"):
        MetaflowCodeContentV1._module_files = _without_bytecode(MetaflowCodeContentV1._module_files)


def _without_bytecode(original: Callable[..., Iterator[tuple[str, str]]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def files(self: Any, name: str, paths: set[str]) -> Iterator[tuple[str, str]]:
        return (pair for pair in original(self, name, paths) if not pair[0].endswith(".pyc"))

    return files
