"""Retry rules of Argo Workflows, from docs/retries.md and workflow/controller/operator.go (3.7).

``replay`` answers what becomes of a compiled step whose attempts end in a given way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MINUTE, HOUR, DAY = 60, 3600, 86400
_DURATION = {"s": 1, "m": MINUTE, "h": HOUR, "d": DAY}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of one attempt: after how many seconds, and what Argo sees."""

    after_s: float
    status: str = "Failed"  # "Succeeded", "Failed" or "Error"
    exit_code: str = "-1"
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The outcome of a step."""

    status: str
    attempts: int
    waits_s: tuple[float, ...]
    why: str = ""


SUCCEEDED = Ending(after_s=HOUR, status="Succeeded", exit_code="0")


def replay(template: dict[str, Any], endings: Sequence[Ending]) -> Replay:
    """Retry a template as Argo's controller does; the attempts end as listed, one after the other."""
    strategy = template.get("retryStrategy")
    deadline_of_pods = template.get("activeDeadlineSeconds")
    now, last_deadline, waits = 0.0, 0.0, list[float]()
    for attempt, planned in enumerate(endings):
        limits = [limit for limit in (deadline_of_pods, last_deadline and last_deadline - now) if limit]
        ending = planned
        if limits and planned.after_s > min(limits):
            ending = Ending(after_s=min(limits), message="Pod was active on the node longer than ...")
        now += ending.after_s
        if ending.status == "Succeeded":
            return Replay(status="Succeeded", attempts=attempt + 1, waits_s=tuple(waits))

        def over(why: str, made: int = attempt + 1, last: Ending = ending) -> Replay:
            return Replay(status=last.status, attempts=made, waits_s=tuple(waits), why=why)

        if strategy is None:
            return over("no retryStrategy")
        backoff = strategy.get("backoff") or {}
        wait = _seconds(backoff.get("duration", "0s")) * float(backoff.get("factor") or 1) ** attempt
        if maximum := backoff.get("maxDuration"):
            last_deadline = _seconds(maximum)  # from the start of the first attempt
            if now + wait > last_deadline:
                return over("Backoff would exceed max duration limit")
        policy = strategy.get("retryPolicy", "Always" if strategy.get("expression") else "OnFailure")
        if policy not in ("Always", {"Failed": "OnFailure", "Error": "OnError"}[ending.status]):
            return over("retryPolicy")
        if attempt + 1 > int(strategy["limit"]):
            return over("No more retries left")
        if not _evaluate(strategy.get("expression", ""), ending):
            return over("retryStrategy.expression evaluated to false")
        waits.append(wait)
        now += wait
    raise AssertionError("Argo would start one more attempt than the test has endings for.")


def _seconds(duration: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([smhd])", duration).groups()  # type: ignore[union-attr]
    return float(number) * _DURATION[unit]


def _evaluate(expression: str, last: Ending) -> bool:
    """Evaluate the part of expr-lang that the compiled expressions use."""
    if not expression:
        return True
    values = {"exitCode": last.exit_code, "status": last.status, "message": last.message}
    text = re.sub(r"(lastRetry\.\w+) contains ('[^']*')", r"(\2 in \1)", expression)
    text = text.replace("lastRetry.", "").replace("||", " or ").replace("!(", " not (")
    return bool(eval(text, {"__builtins__": {}}, values))  # noqa: S307 - this repository compiles it
