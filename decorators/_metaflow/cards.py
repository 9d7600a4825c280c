"""The card of a step while it runs, and when it fails."""

from __future__ import annotations

import threading
import time
from typing import Any

from metaflow.plugins.cards.card_creator import CardProcessManager

from decorators._metaflow.datastores import datastore_given_up

CARD_ID = "finetune"


def card() -> Any | None:
    """This task's ``finetune`` card (Metaflow's CardComponentManager); None where the step has none."""
    from metaflow import current

    return current.card[CARD_ID] or None if "card" in current else None


_PAGE_S = 60.0  # for a page; it is done in two or three where the datastore answers


def push_card(manager: Any, ending: threading.Event | None = None) -> None:
    """Publish a card's page as it is now, and return when that is done (or the step is ending).

    Starts a process of the flow's ``card create`` command for the page and, unless it is the first, then
    one for the token by which an open page knows that it is outdated. A page that isn't made in a minute is
    given up.
    """
    if datastore_given_up():
        return
    manager._render_seq += 1
    manager._last_layout_change = manager.components.layout_last_changed_on
    manager._card_proc("render_runtime")
    card = manager._card_creator_args["card_uuid"]
    page, _ = CardProcessManager._get_card_process(card)
    deadline = time.monotonic() + _PAGE_S
    while page is not None and page.poll() is None:  # Metaflow's own waiting would take a whole core
        if time.monotonic() > deadline:
            CardProcessManager._remove_card_process(card)
            return
        if ending is None:
            time.sleep(0.05)
        elif ending.wait(0.05):
            return
    if manager._render_seq > 1:  # before the first page, none can be open; so does Metaflow's own refresh()
        manager._card_proc("refresh", sync=True)
