"""Compiled modules shared by the pods of a hub.

Each pod unpacks the run's code package anew, and compiling it (Metaflow and this project) takes a Python
about two seconds of a core. The package's files have the same paths, sizes and times in every pod, so what
one pod has compiled holds for the others. Installed packages keep their own ``__pycache__``.
"""

from __future__ import annotations

from pathlib import Path

_MODULE = """
import importlib._bootstrap_external as loader

def in_the_cache(path, *arguments, **options):
    compiled = beside(path, *arguments, **options)
    return {cache!r} + compiled if path.startswith({home!r}) else compiled

beside = loader.cache_from_source
loader.cache_from_source = in_the_cache
"""


def install(folder: Path, *, home: str, cache: str) -> None:
    """Make Pythons with the site-packages ``folder`` cache modules compiled below ``home`` in ``cache``."""
    (folder / "code_cache_of_tests.py").write_text(_MODULE.format(home=f"{home}/", cache=cache))
    (folder / "code_cache.pth").write_text("import code_cache_of_tests\n")
