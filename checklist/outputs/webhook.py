"""The result as a Slack-shaped message to a webhook, whose URL is a secret and so is never shown."""

from __future__ import annotations

import datetime
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

from checklist.result import Finding, Result

URL_VARIABLE = "CHECKLIST_WEBHOOK_URL"  # not an option: it is in no artifact and on no command line
TIMEOUT_S = 5.0
TRIES = 4
LATER = (429, 503)  # too many requests, out of service: what Retry-After is for (RFC 9110 10.2.3, RFC 6585 4)
WAIT_S = 1.0  # before the second try where the answer doesn't say, then twice as long each time
MOST_WAIT_S = 60.0  # in all, whatever is asked for: the run's end waits too
MOST_FINDINGS = 10
MOST_CHARACTERS = 2900  # Slack takes 3,000 in a section's text
SYMBOLS = {"PASS": ":white_check_mark:", "WARN": ":warning:", "FAIL": ":x:", "NO-VERDICT": ":grey_question:"}


def message(result: Result, *, title: str = "Checklist") -> dict[str, Any]:
    """The body: ``text`` for notifications, ``blocks`` for the message."""
    nodes = f"{len(result.healthy_nodes)} of {len(result.nodes)} nodes healthy"
    bad = f", bad: {', '.join(result.bad_nodes)}" if result.bad_nodes else ""
    head = f"{SYMBOLS[result.verdict]} *{_plain(title)}: {result.verdict}*\n{_plain(result.headline)}"
    blocks = [_section(head), _section(_plain(f"{nodes}{bad}."))]
    blocks += [_section(_finding(finding)) for finding in result.findings[:MOST_FINDINGS]]
    if len(result.findings) > MOST_FINDINGS:
        blocks.append(_section(f"And {len(result.findings) - MOST_FINDINGS} more findings."))
    return {"text": _plain(f"{title}: {result.verdict}. {result.headline}"), "blocks": blocks}


@dataclass(frozen=True, slots=True)
class _Answer:
    """How a call ended."""

    problem: str | None = None
    """Why it failed, without the address; None: it has not."""
    later: bool = False
    """Whether another call may be well."""
    wait_s: float | None = None
    """For how long the answer asks to wait before that."""


def send(
    result: Result,
    url: str,
    *,
    title: str = "Checklist",
    timeout_s: float = TIMEOUT_S,
    most_wait_s: float = MOST_WAIT_S,
) -> str | None:
    """Posts the message; a line of warning where that failed, else None.

    One that is told to come later does, when it is told to. Returns within ``timeout_s`` for each of the
    ``TRIES`` and ``most_wait_s`` between them together.
    """
    if not is_address(url):
        return f"The webhook was not called: ${URL_VARIABLE} is no http(s) address."
    problem = _call(url, json.dumps(message(result, title=title)).encode(), timeout_s, most_wait_s)
    return None if problem is None else f"The webhook could not be called: {problem}. The result is kept."


def _call(url: str, body: bytes, timeout_s: float, left_s: float) -> str | None:
    """Why it failed; None: it has not."""
    for tried in range(1, TRIES + 1):
        answer = _within(url, body, timeout_s)
        if not answer.later:
            return answer.problem
        wait_s = WAIT_S * 2 ** (tried - 1) if answer.wait_s is None else answer.wait_s
        if wait_s > left_s:
            due = f"the next call is due in {wait_s:g} s, and no more than {left_s:g} s are left"
            return f"{answer.problem}, {due}"
        if tried < TRIES:
            time.sleep(wait_s)
            left_s -= wait_s
    return f"{answer.problem}, {TRIES} times"


def _within(url: str, body: bytes, timeout_s: float) -> _Answer:
    """One call that ends in time: urlopen's limit is for each read, which a dripping server can stretch."""
    answers: list[_Answer] = []
    worker = threading.Thread(target=lambda: answers.append(_post(url, body, timeout_s)), daemon=True)
    worker.start()
    worker.join(timeout_s)
    return answers[0] if answers else _Answer(f"no answer within {timeout_s:g} s")


def asked_wait(headers: Message) -> float | None:
    """Seconds until the time that Retry-After tells, as a number or a date; None: it tells none.

    A date is held against the server's own clock where the answer has it: two hosts' may differ.
    """
    told = (headers.get("Retry-After") or "").strip()
    if told.isascii() and told.isdigit():
        return float(told)
    until, now = _date(told), _date(headers.get("Date") or "")
    if until is None:
        return None
    return max(0.0, until - (time.time() if now is None else now))


def _date(text: str) -> float | None:
    """Unix time of an HTTP date; None: it is none."""
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    # An HTTP date is in GMT; "-0000" would leave it without a zone
    return (date if date.tzinfo else date.replace(tzinfo=datetime.timezone.utc)).timestamp()


def out_of_reach(url: str, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """Why a message could not be sent now: nobody listens there; None where somebody does. Sends nothing."""
    if not is_address(url):
        return f"${URL_VARIABLE} is no http(s) address."
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=timeout_s).close()
    except (OSError, ValueError) as error:  # their texts may quote the address
        return f"The webhook in ${URL_VARIABLE} can't be reached: no connection ({type(error).__name__})."
    return None


def is_address(url: str) -> bool:
    """Whether it is one that a message could be sent to."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _post(url: str, body: bytes, timeout_s: float) -> _Answer:
    """One call; its problem is without the address, which some errors quote."""
    try:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            url, data=body, headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout_s):  # noqa: S310
            return _Answer()
    except urllib.error.HTTPError as error:
        later = error.code in LATER
        wait_s = asked_wait(error.headers) if later else None
        return _Answer(f"it answers with status {error.code}", later, wait_s)
    except TimeoutError:
        return _Answer(f"no answer within {timeout_s:g} s")
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return _Answer(f"no answer within {timeout_s:g} s")
        return _Answer(f"no connection ({type(error.reason).__name__})")
    except (OSError, ValueError) as error:
        return _Answer(f"no connection ({type(error).__name__})")


def _section(text: str) -> dict[str, Any]:
    cut = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
    return {"type": "section", "text": {"type": "mrkdwn", "text": cut}}


def _finding(finding: Finding) -> str:
    lines = [f"*{finding.verdict}* {_plain(finding.title)}", *map(_plain, finding.advice)]
    if finding.command:
        lines.append(f"`{_plain(finding.command)}`")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Without what Slack would read as its own marks."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
