"""The result as a Slack-shaped message to a webhook, whose URL is a secret and so is never shown."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from checklist.result import Finding, Result

URL_VARIABLE = "CHECKLIST_WEBHOOK_URL"  # not an option: it is in no artifact and on no command line
TIMEOUT_S = 5.0
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


def send(result: Result, url: str, *, title: str = "Checklist", timeout_s: float = TIMEOUT_S) -> str | None:
    """Posts the message; a line of warning where that failed, else None. Returns within the timeout."""
    if not is_address(url):
        return f"The webhook was not called: ${URL_VARIABLE} is no http(s) address."
    body = json.dumps(message(result, title=title)).encode()
    reasons: list[str | None] = []
    # urlopen's timeout is for each read, which a dripping server can stretch without end
    worker = threading.Thread(target=lambda: reasons.append(_post(url, body, timeout_s)), daemon=True)
    worker.start()
    worker.join(timeout_s)
    reason = reasons[0] if reasons else f"no answer within {timeout_s:g} s"
    return None if reason is None else f"The webhook could not be called: {reason}. The result is kept."


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


def _post(url: str, body: bytes, timeout_s: float) -> str | None:
    """Why it failed, without the address, which some errors quote."""
    try:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            url, data=body, headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=timeout_s):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        return f"it answers with status {error.code}"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            return f"no answer within {timeout_s:g} s"
        return f"no connection ({type(error.reason).__name__})"
    except (OSError, ValueError) as error:
        return f"no connection ({type(error).__name__})"


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
