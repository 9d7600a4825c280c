"""Parts of this project's packages that travel with a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from metaflow.packaging_sys.v1 import MetaflowCodeContentV1


def leave_bytecode_out() -> None:
    """For the process that launches: no ``.pyc`` of an installed package goes into the code package.

    pip compiles what it installs and records that, and Metaflow takes what is recorded: more bytes than the
    sources, for one release of Python, which need not be the containers'.
    """
    if not hasattr(MetaflowCodeContentV1._module_files, "__wrapped__"):
        MetaflowCodeContentV1._module_files = _without_bytecode(MetaflowCodeContentV1._module_files)


def _without_bytecode(own: Callable[..., Iterator[tuple[str, str]]]) -> Callable[..., Any]:
    @functools.wraps(own)
    def files(self: Any, name: str, paths: set[str]) -> Iterator[tuple[str, str]]:
        return (pair for pair in own(self, name, paths) if not pair[0].endswith(".pyc"))

    return files
