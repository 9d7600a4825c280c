"""Output of the result as a Slack-compatible message to a webhook, whose URL is secret and never shown."""

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

URL_VARIABLE = "CHECKLIST_WEBHOOK_URL"  # not an option, to keep it out of artifacts and command lines
TIMEOUT_S = 5.0
TRIES = 4
LATER = (429, 503)  # too many requests, unavailable: statuses with Retry-After (RFC 9110 10.2.3, RFC 6585 4)
WAIT_S = 1.0  # delay before the second try without Retry-After; doubles each time
MAX_WAIT_S = 60.0  # maximum total delay regardless of Retry-After, because the run waits for it
MAX_FINDINGS = 10
MAX_CHARACTERS = 2900  # Slack's limit for a section's text is 3,000
SYMBOLS = {"PASS": ":white_check_mark:", "WARN": ":warning:", "FAIL": ":x:", "NO-VERDICT": ":grey_question:"}


def message(result: Result, *, title: str = "Checklist") -> dict[str, Any]:
    """Build the body: ``text`` for notifications, ``blocks`` for the message."""
    nodes = f"{len(result.healthy_nodes)} of {len(result.nodes)} nodes healthy"
    bad_nodes = f", bad: {', '.join(result.bad_nodes)}" if result.bad_nodes else ""
    header = f"{SYMBOLS[result.verdict]} *{_plain(title)}: {result.verdict}*\n{_plain(result.headline)}"
    blocks = [_section(header), _section(_plain(f"{nodes}{bad_nodes}."))]
    blocks += [_section(_finding(finding)) for finding in result.findings[:MAX_FINDINGS]]
    if len(result.findings) > MAX_FINDINGS:
        blocks.append(_section(f"And {len(result.findings) - MAX_FINDINGS} more findings."))
    return {"text": _plain(f"{title}: {result.verdict}. {result.headline}"), "blocks": blocks}


@dataclass(frozen=True, slots=True)
class _Answer:
    """Outcome of a request."""

    problem: str | None = None
    """Reason for the failure, without the address; None on success."""
    later: bool = False
    """Whether a retry may succeed."""
    wait_s: float | None = None
    """Delay requested by the response before a retry."""


def send(
    result: Result,
    url: str,
    *,
    title: str = "Checklist",
    timeout_s: float = TIMEOUT_S,
    most_wait_s: float = MAX_WAIT_S,
) -> str | None:
    """Post the message; return a warning on failure, else None.

    Retries as requested by Retry-After. Returns within ``timeout_s`` for each of the ``TRIES`` plus
    ``most_wait_s`` for all delays together.
    """
    if not is_address(url):
        return f"The webhook was not called: ${URL_VARIABLE} is not an http(s) address."
    problem = _call(url, json.dumps(message(result, title=title)).encode(), timeout_s, most_wait_s)
    return None if problem is None else f"The webhook could not be called: {problem}. The result is kept."


def _call(url: str, body: bytes, timeout_s: float, left_s: float) -> str | None:
    """Post with retries; return the reason for a failure, None on success."""
    for attempt in range(1, TRIES + 1):
        reply = _post_with_limit(url, body, timeout_s)
        if not reply.later:
            return reply.problem
        wait_s = WAIT_S * 2 ** (attempt - 1) if reply.wait_s is None else reply.wait_s
        if wait_s > left_s:
            next_try = f"the next attempt would be in {wait_s:g} s, and only {left_s:g} s are left"
            return f"{reply.problem}, {next_try}"
        if attempt < TRIES:
            time.sleep(wait_s)
            left_s -= wait_s
    return f"{reply.problem}, {TRIES} times"


def _post_with_limit(url: str, body: bytes, timeout_s: float) -> _Answer:
    """Send one request with a total time limit; urlopen's limit applies only to each read."""
    replies: list[_Answer] = []
    worker = threading.Thread(target=lambda: replies.append(_post(url, body, timeout_s)), daemon=True)
    worker.start()
    worker.join(timeout_s)
    return replies[0] if replies else _Answer(f"no answer within {timeout_s:g} s")


def retry_delay_s(headers: Message) -> float | None:
    """Parse the delay in seconds from Retry-After (number or date); None without one.

    A date is compared with the server's Date header if present, because clocks may differ.
    """
    retry_after = (headers.get("Retry-After") or "").strip()
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    until, server_time = _date(retry_after), _date(headers.get("Date") or "")
    if until is None:
        return None
    return max(0.0, until - (time.time() if server_time is None else server_time))


def _date(text: str) -> float | None:
    """Parse an HTTP date to Unix time; None if invalid."""
    try:
        date = parsedate_to_datetime(text)
    except ValueError:
        return None
    # HTTP dates are in GMT; "-0000" would parse without a zone
    return (date if date.tzinfo else date.replace(tzinfo=datetime.timezone.utc)).timestamp()


def unreachable_reason(url: str) -> str | None:
    """Return why the webhook is unreachable, without sending anything; None if it accepts connections."""
    if not is_address(url):
        return f"${URL_VARIABLE} is not an http(s) address."
    url_parts = urlsplit(url)
    try:
        port = url_parts.port or (443 if url_parts.scheme == "https" else 80)
        socket.create_connection((url_parts.hostname or "", port), timeout=TIMEOUT_S).close()
    except (OSError, ValueError) as error:  # error texts may contain the address
        return f"The webhook in ${URL_VARIABLE} cannot be reached: no connection ({type(error).__name__})."
    return None


def is_address(url: str) -> bool:
    """Return whether the address is valid for a webhook."""
    try:
        url_parts = urlsplit(url)
    except ValueError:
        return False
    return url_parts.scheme in ("http", "https") and bool(url_parts.hostname)


def _post(url: str, body: bytes, timeout_s: float) -> _Answer:
    """Send one request; removes the address from error texts."""
    try:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            url, data=body, headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout_s):  # noqa: S310
            return _Answer()
    except urllib.error.HTTPError as error:
        retry = error.code in LATER
        wait_s = retry_delay_s(error.headers) if retry else None
        return _Answer(f"it answers with status {error.code}", retry, wait_s)
    except TimeoutError:
        return _Answer(f"no answer within {timeout_s:g} s")
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return _Answer(f"no answer within {timeout_s:g} s")
        return _Answer(f"no connection ({type(error.reason).__name__})")
    except (OSError, ValueError) as error:
        return _Answer(f"no connection ({type(error).__name__})")


def _section(text: str) -> dict[str, Any]:
    shortened = text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
    return {"type": "section", "text": {"type": "mrkdwn", "text": shortened}}


def _finding(finding: Finding) -> str:
    lines = [f"*{finding.verdict}* {_plain(finding.title)}", *map(_plain, finding.advice)]
    if finding.command:
        lines.append(f"`{_plain(finding.command)}`")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Escape Slack's markup."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
