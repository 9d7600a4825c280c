"""``--refresh``: current prices from AWS and gpuhunt, cached for this user (cache.py).

Failures never fail a command: each provider reports its result in one line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date

from estimator import hardware
from estimator.errors import UserError
from estimator.hardware.catalogue import Catalogue
from estimator.hardware.catalogue.csv_files import Cells
from estimator.hardware.prices import aws, cache, gpuhunt
from estimator.hardware.prices.cache import ProviderAnswer

LIMIT_S = 90.0  # for all providers together
GRACE_S = 10.0  # allowance for the last call of a provider after the limit

Provider = Callable[[Catalogue, float, date], ProviderAnswer]
PROVIDERS: tuple[tuple[str, Provider], ...] = (("gpuhunt", gpuhunt.fetch), ("aws", aws.fetch))


@dataclass(kw_only=True, slots=True)
class _Query:
    """Request to one provider, in a thread that is abandoned after the time limit."""

    name: str
    provider: Provider
    result: ProviderAnswer | None = None
    thread: threading.Thread = field(init=False)

    def start(self, catalogue: Catalogue, deadline: float, today: date) -> None:
        self.thread = threading.Thread(target=self._query, args=(catalogue, deadline, today), daemon=True)
        self.thread.start()

    def _query(self, catalogue: Catalogue, deadline: float, today: date) -> None:
        try:
            self.result = self.provider(catalogue, deadline, today)
        except Exception as error:  # noqa: BLE001 - providers are independent
            self.result = ProviderAnswer(line=f"failed, nothing changed: {type(error).__name__}: {error}")


def refresh(
    catalogue: Catalogue | None = None, *, limit_s: float = LIMIT_S, today: date | None = None
) -> tuple[str, ...]:
    """Request prices from all providers and cache them for later catalogues.

    Returns one line per provider, and one if the cache cannot be written. Never raises; takes at most
    ``limit_s`` seconds.
    """
    lines, cells = query_providers(catalogue or hardware.catalogue(), limit_s=limit_s, today=today)
    if cells:
        lines += _update_cache(cells)
    return tuple(lines)


def query_providers(
    catalogue: Catalogue, *, limit_s: float = LIMIT_S, today: date | None = None
) -> tuple[list[str], dict[str, Cells]]:
    """Query all providers concurrently; returns one line per provider, and cells by instance type."""
    day = today or date.today()
    end = time.monotonic() + limit_s
    queries = [_Query(name=name, provider=provider) for name, provider in PROVIDERS]
    for query in queries:
        query.start(catalogue, end - min(GRACE_S, limit_s / 2), day)
    lines, updates = [], dict[str, Cells]()
    for query in queries:
        query.thread.join(max(end - time.monotonic(), 0))
        result = query.result or ProviderAnswer(line=f"no answer within {limit_s:g} s, nothing changed")
        lines.append(f"{query.name}: {' '.join(result.line.split())}")
        for name, cells in result.machines.items():
            updates[name] = updates.get(name, {}) | cells  # AWS is last and takes precedence
    return lines, updates


def _update_cache(updates: dict[str, Cells]) -> list[str]:
    file = cache.path()
    try:
        machines = cache.rows(file)
    except UserError:
        machines = {}  # damaged, and ignored by readers too
    try:
        cache.write(file, machines | updates)
    except OSError as error:
        return [f"not saved: cannot write {file}: {error.strerror or error}"]
    hardware.clear_cache()
    return []
