"""Rendering of a step's card in the step's own process, while it runs and when it ends or fails.

By default Metaflow starts a process per page that imports the whole flow again: seconds of CPU time, and a
step ends only after two of them. The page of a blank card is a template filled with JSON, which takes about
10 ms.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from metaflow.plugins.cards.card_cli import update_card
from metaflow.plugins.cards.card_creator import CardCreator
from metaflow.plugins.cards.card_datastore import CardDatastore
from metaflow.plugins.cards.card_decorator import CardDecorator
from metaflow.plugins.cards.card_modules.basic import BlankCard
from metaflow.plugins.cards.metadata import _save_metadata
from metaflow.system_context import system_context

from decorators._metaflow.datastores import datastore_given_up

CARD_ID = "finetune"
# On a narrow screen Metaflow's page gives a chart no width, and it has no dark mode.
_STYLE = """<style>
.mf-card .vega-embed { display: block !important; width: 100%; overflow-x: auto; }
@media (prefers-color-scheme: dark) {
  html { background: #fff; filter: invert(0.92) hue-rotate(180deg); }
}
</style>
</head>"""


def card() -> Any | None:
    """Return this task's ``finetune`` card (Metaflow's CardComponentManager); None if the step has none."""
    from metaflow import current

    return current.card[CARD_ID] or None if "card" in current else None


class _InProcess(CardCreator):  # type: ignore[misc]
    """Card creator that renders blank cards in this process, and all others like Metaflow's own creator."""

    def __init__(self, metaflows: Any) -> None:
        super().__init__(metaflows._top_level_options, metaflows._should_save_metadata)
        storage = system_context.flow_datastore._storage_impl
        root = CardDatastore.get_storage_root(storage.TYPE) or storage.datastore_root
        self._datastore = SimpleNamespace(
            _storage_impl=type(storage)(root), flow_name=system_context.flow_datastore.flow_name
        )
        self.final = False  # whether the last page has been rendered
        self._kept: set[str] = set()  # cards whose page of the earlier attempt is stored under another id

    def _run_cards_subprocess(
        self,
        card_uuid: str,
        card_id: str | None,
        mode: str,
        runspec: str,
        attributes: dict[str, Any],
        options: dict[str, Any] | None,
        components: list[Any],
        logger: Callable[..., None],
        data: dict[str, Any] | None = None,
        **flags: Any,  # final, sync, save_metadata, metadata_dict
    ) -> None:
        if attributes["type"] != BlankCard.type:
            arguments = (card_uuid, card_id, mode, runspec, attributes, options, components, logger, data)
            super()._run_cards_subprocess(*arguments, **flags)
            return
        final = flags["final"]
        if datastore_given_up():
            return
        self.final = self.final or final
        try:
            pathspec = f"{self._datastore.flow_name}/{runspec}"
            task = SimpleNamespace(pathspec=pathspec, finished=final)
            title = (options or {}).get("title", "")
            page = BlankCard(options={"title": title}, components=components)
            content = update_card(page, mode, task, data or {}).data
            content = content if mode == "refresh" else _styled(content)
            cards = CardDatastore(self._datastore, pathspec=pathspec)
            if card_id is not None:
                card_uuid = _uuid_of(pathspec, card_id)
                self._keep_earlier_attempt(cards, card_uuid, card_id)
            save = cards.save_data if mode == "refresh" else cards.save_card
            save(card_uuid, BlankCard.type, content, card_id=card_id)
            if flags["save_metadata"]:
                ids = (*runspec.split("/"), system_context.retry_count or 0)
                _save_metadata(system_context.metadata, *ids, card_uuid, flags["metadata_dict"])
        except Exception as error:
            if not final:
                raise  # reported by the caller that pushes the card
            logger(f"The card could not be stored: {type(error).__name__}: {error}", bad=True)

    def _keep_earlier_attempt(self, cards: Any, card_uuid: str, card_id: str) -> None:
        """Store the page of the attempt before this one under another id before it is replaced."""
        attempt = system_context.retry_count or 0
        if attempt == 0 or card_id in self._kept:
            return
        self._kept.add(card_id)
        folder = cards._get_card_read_path(with_steps=True)
        page = cards.get_card_html(
            cards.get_card_location(folder, BlankCard.type, card_uuid, card_id=card_id)
        )
        if page is not None:
            other_id = f"{card_id}_attempt_{attempt - 1}"
            other_uuid = _uuid_of(cards._pathspec, other_id)
            cards.save_card(other_uuid, BlankCard.type, page, card_id=other_id)


def _uuid_of(pathspec: str, card_id: str) -> str:
    """Return the part of a card's file name that Metaflow chooses at random, for each attempt of a task.

    Metaflow refuses to show a card by its id if attempts have left several.
    """
    return uuid.uuid5(uuid.NAMESPACE_URL, f"{pathspec}/{card_id}").hex


def standalone_page(title: str, components: list[Any]) -> str:
    """Render components as a standalone HTML page in the style of a card; needs no network."""
    from metaflow.plugins.cards.card_modules.basic import SectionComponent

    contents = SectionComponent(contents=[component.render() for component in components]).render()
    page = BlankCard(options={"title": ""}, components=[contents])
    return _styled(update_card(page, "render", SimpleNamespace(pathspec=title), {}).data)


def _styled(page: str) -> str:
    return page.replace("</head>", _STYLE, 1)


def make_in_process(manager: Any) -> None:
    """Render all pages of this task's blank cards in this process, including the last one."""
    if isinstance(CardDecorator.card_creator, _InProcess):
        creator = CardDecorator.card_creator
    else:
        creator = _InProcess(manager._card_creator)
        CardDecorator._set_card_creator(creator)
    manager._card_creator = creator


def push_card(manager: Any) -> None:
    """Publish the current page of a card and wait until it is stored.

    The reload token is stored after the page, so that an open page refreshes. Does nothing after the
    datastore was given up or the last page was rendered.
    """
    creator = manager._card_creator
    if datastore_given_up() or getattr(creator, "final", False):
        return
    manager._render_seq += 1
    manager._last_layout_change = manager.components.layout_last_changed_on
    manager._card_proc("render_runtime")
    manager._card_proc("refresh")
