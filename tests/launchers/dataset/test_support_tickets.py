"""The generated default dataset: its records, and the differences between its splits."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from launchers.dataset import rows
from launchers.dataset.support_tickets import AREAS, PRODUCTS, ROWS, SPLITS, Split, tickets, write


def words(texts: Iterable[str]) -> set[str]:
    return set(re.findall(r"[a-z]+", " ".join(texts).lower()))


def test_rows_are_identical_each_time_whatever_the_state_of_the_random_generator(tmp_path: Path) -> None:
    first = {split: write(tmp_path / split, split).read_bytes() for split in SPLITS}
    random.seed(7)
    random.random()
    assert {split: write(tmp_path / "again", split).read_bytes() for split in SPLITS} == first


@pytest.mark.parametrize("split", SPLITS)
def test_every_row_is_a_unique_message_with_its_record(tmp_path: Path, split: Split) -> None:
    stored_tickets = list(rows.read(write(tmp_path / "tickets.jsonl", split)))
    assert len({row.messages[0].content for row in stored_tickets}) == len(stored_tickets) == ROWS[split]
    for row in stored_tickets:
        question, answer = row.messages
        record = json.loads(answer.content)
        assert list(record) == ["area", "product", "urgent"]
        assert record["area"] in AREAS
        assert record["product"] in question.content
        assert record["product"] in PRODUCTS
        assert isinstance(record["urgent"], bool)
    assert {ticket.area for ticket in tickets(split)} == set(AREAS)
    assert {ticket.product for ticket in tickets(split)} == set(PRODUCTS)
    assert 0.4 < sum(ticket.urgent for ticket in tickets(split)) / len(stored_tickets) < 0.6


def test_half_of_the_test_rows_have_a_wording_that_the_train_split_lacks() -> None:
    trained = {ticket.wording for ticket in tickets("train")}
    messages = ({ticket.message for ticket in tickets(split)} for split in SPLITS)
    assert set.isdisjoint(*messages)
    new = [ticket for ticket in tickets("test") if ticket.wording not in trained]
    assert len(new) == ROWS["test"] // 2
    assert {ticket.area for ticket in new} == set(AREAS)
    assert not trained & {wording for area in AREAS.values() for wording in area.held_out}


def test_wordings_of_the_test_split_use_only_words_of_the_train_split() -> None:
    trained = words(ticket.message for ticket in tickets("train"))
    assert words(ticket.message for ticket in tickets("test")) <= trained
