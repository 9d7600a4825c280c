"""``--refresh``: today's prices from AWS and from gpuhunt, kept for this user (price_cache.py).

Nothing here can fail a command: each provider ends in one line that says what happened.
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
GRACE_S = 10.0  # a provider's last call may take so much longer than its time

Provider = Callable[[Catalogue, float, date], ProviderAnswer]
PROVIDERS: tuple[tuple[str, Provider], ...] = (("gpuhunt", gpuhunt.ask), ("aws", aws.ask))


@dataclass(kw_only=True, slots=True)
class _Question:
    """One provider being asked, in a thread that is left behind when it takes too long."""

    name: str
    provider: Provider
    answer: ProviderAnswer | None = None
    thread: threading.Thread = field(init=False)

    def start(self, catalogue: Catalogue, deadline: float, today: date) -> None:
        self.thread = threading.Thread(target=self._ask, args=(catalogue, deadline, today), daemon=True)
        self.thread.start()

    def _ask(self, catalogue: Catalogue, deadline: float, today: date) -> None:
        try:
            self.answer = self.provider(catalogue, deadline, today)
        except Exception as error:  # noqa: BLE001 - one provider's failure never takes the others down
            self.answer = ProviderAnswer(line=f"failed, nothing changed: {type(error).__name__}: {error}")


def refresh(
    catalogue: Catalogue | None = None, *, limit_s: float = LIMIT_S, today: date | None = None
) -> tuple[str, ...]:
    """Ask every provider for the catalogue's machines and keep what they say.

    Returns one line for each provider, and one where the result could not be kept. Raises nothing; takes
    ``limit_s`` seconds at most. Later catalogues have the prices.
    """
    lines, learned = ask(catalogue or hardware.catalogue(), limit_s=limit_s, today=today)
    if learned:
        lines += _keep(learned)
    return tuple(lines)


def ask(
    catalogue: Catalogue, *, limit_s: float = LIMIT_S, today: date | None = None
) -> tuple[list[str], dict[str, Cells]]:
    """Ask every provider at once: a line for each, and what they say by machine name. Raises nothing."""
    day = today or date.today()
    end = time.monotonic() + limit_s
    questions = [_Question(name=name, provider=provider) for name, provider in PROVIDERS]
    for question in questions:
        question.start(catalogue, end - min(GRACE_S, limit_s / 2), day)
    lines, learned = [], dict[str, Cells]()
    for question in questions:
        question.thread.join(max(end - time.monotonic(), 0))
        answer = question.answer or ProviderAnswer(line=f"no answer within {limit_s:g} s, nothing changed")
        lines.append(f"{question.name}: {' '.join(answer.line.split())}")
        for name, cells in answer.machines.items():
            learned[name] = learned.get(name, {}) | cells  # AWS itself is last and wins
    return lines, learned


def _keep(learned: dict[str, Cells]) -> list[str]:
    file = cache.path()
    try:
        machines = cache.rows(file)
    except UserError:
        machines = {}  # damaged: nothing in it is used anyway
    try:
        cache.write(file, machines | learned)
    except OSError as error:
        return [f"not kept: {file} can't be written: {error.strerror or error}"]
    hardware.forget()
    return []
