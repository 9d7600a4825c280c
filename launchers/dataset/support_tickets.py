"""Built-in default dataset: support messages, each with the JSON record that a help desk extracts from it.

The rows are generated from phrases, without a download, and are so small that a model of 5 million random
parameters learns the task in about a minute on a CPU. They depend only on this file: the generator is seeded
and uses only ``Random.random()``, which returns the same values in every version of Python.

The dataset has two splits. ``train`` never contains a message of ``test``. Every second row of ``test`` also
describes its problem in a wording that no row of ``train`` contains.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from launchers.dataset.python_docs import write_rows

Split = Literal["train", "test"]

NAME = "support-tickets"
SPLITS: tuple[Split, ...] = ("train", "test")
ROWS: dict[Split, int] = {"train": 3840, "test": 150}


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """Phrases that describe one kind of problem. ``{p}`` is replaced by the product."""

    training: tuple[str, ...]
    """Wordings of both splits."""
    held_out: tuple[str, ...]
    """Wordings used only in the test split, built from words that occur in ``training``."""


AREAS: dict[str, Area] = {
    "billing": Area(
        training=(
            "I was charged twice for the {p}.",
            "the invoice for my {p} is wrong.",
            "my card was declined when I paid for the {p}.",
            "the invoice shows a higher price for the {p}.",
            "I paid for the {p} but got no invoice.",
            "the payment for my {p} failed.",
            "why was my card charged for a second {p}?",
            "the discount is missing on the invoice for the {p}.",
            "I never got the receipt for the {p}.",
            "please send me the receipt for my {p}.",
            "I was charged the wrong price for the {p}.",
            "can I pay for the {p} by card?",
        ),
        held_out=(
            "my card was charged the wrong price for the {p}.",
            "the receipt for the {p} shows a higher price.",
            "please send me the invoice for my {p}.",
            "the discount is missing on my payment for the {p}.",
        ),
    ),
    "delivery": Area(
        training=(
            "my {p} has not arrived.",
            "the parcel with the {p} is lost.",
            "when will the {p} be delivered?",
            "the {p} was delivered to the wrong address.",
            "the tracking page says nothing about my {p}.",
            "the courier left my {p} in the rain.",
            "the parcel arrived without the {p}.",
            "the tracking number of the {p} does not work.",
            "please ship the {p} to another address.",
            "the courier did not find my address to deliver the {p}.",
            "the courier was at my old address with the {p}.",
            "can the courier bring the {p} in the evening?",
        ),
        held_out=(
            "the courier lost the parcel with my {p}.",
            "the tracking page says my {p} was delivered.",
            "my {p} arrived at the wrong address.",
            "when will the courier bring my {p}?",
        ),
    ),
    "defect": Area(
        training=(
            "my {p} does not switch on.",
            "the {p} makes a strange noise.",
            "the {p} broke after one day.",
            "my {p} is cracked.",
            "smoke comes out of the {p}.",
            "the {p} stopped working.",
            "a button of my {p} is broken.",
            "the {p} gets far too hot.",
            "my {p} switches itself off.",
            "the {p} is cracked and makes a noise.",
            "the battery of the {p} does not charge.",
            "there is a strange smell from my {p}.",
        ),
        held_out=(
            "smoke comes from my {p} with a strange noise.",
            "the {p} broke and does not switch on.",
            "the {p} gets hot and switches itself off.",
            "the battery of my {p} is broken.",
        ),
    ),
    "account": Area(
        training=(
            "I cannot log in to register my {p}.",
            "I forgot the password of my {p} account.",
            "please change the email of the account for my {p}.",
            "delete my account, I sold the {p}.",
            "my account does not list the {p}.",
            "the login page rejects my password for the {p}.",
            "how do I register the {p} in my account?",
            "I want to reset the password of the {p}.",
            "the email to confirm my {p} account never came.",
            "another person has registered my {p}.",
            "the login code for the {p} has expired.",
            "please remove the {p} from my account.",
        ),
        held_out=(
            "the login page for my {p} account has expired.",
            "please reset my password to register the {p}.",
            "I forgot the email of the account for the {p}.",
            "I cannot log in and want to delete the {p}.",
        ),
    ),
    "return": Area(
        training=(
            "I want to send the {p} back.",
            "how do I return my {p}?",
            "I would like to exchange the {p} for another color.",
            "I changed my mind about the {p}.",
            "the return label for the {p} is missing.",
            "I sent the {p} back and got no reply.",
            "may I return the {p} without its box?",
            "the {p} is not what I ordered, please take it back.",
            "where do I send my {p} to exchange it?",
            "please print a return label for my {p}.",
            "can I still return the {p} after a month?",
            "I want my money back for the {p}.",
        ),
        held_out=(
            "I changed my mind and want to return the {p}.",
            "please take my {p} back and exchange it.",
            "I would like a return label for the {p}.",
            "may I send my {p} back without its box?",
        ),
    ),
    "advice": Area(
        training=(
            "which {p} do you recommend?",
            "is the {p} in stock?",
            "does the {p} work abroad?",
            "what is the difference between this {p} and the new one?",
            "is the {p} suitable for children?",
            "how long is the warranty of the {p}?",
            "do you recommend this {p} for a small office?",
            "will the new {p} be in stock soon?",
            "which size of {p} is suitable for two people?",
            "does the warranty of the {p} hold abroad?",
            "what colors of the {p} do you have?",
            "is the new {p} better than the old one?",
        ),
        held_out=(
            "do you have the new {p} in stock?",
            "is this {p} suitable for a small office?",
            "which {p} do you recommend for children?",
            "how long is the warranty of the {p} abroad?",
        ),
    ),
}

PRODUCTS = (
    "kettle",
    "laptop",
    "headset",
    "camera",
    "printer",
    "router",
    "monitor",
    "keyboard",
    "watch",
    "vacuum cleaner",
    "washing machine",
    "coffee machine",
)

URGENT = (
    "It is urgent.",
    "I need it today.",
    "Please hurry.",
    "This cannot wait.",
    "Please reply as soon as possible.",
    "I need help right now.",
)
CALM = (
    "No rush.",
    "Whenever you can.",
    "Thanks in advance.",
    "Take your time.",
    "It is not urgent.",
    "Next week is fine.",
)
GREETINGS = ("Hello", "Hi there", "Good morning", "Dear team", "Hey", "Good evening")
SIGN_OFFS = ("Regards, Anna", "Best wishes, Tom", "Cheers, Maria", "Thank you, Ali", "Yours, Chen")

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """A message, and the record a help desk extracts from it."""

    message: str
    area: str
    product: str
    urgent: bool
    wording: str
    """The phrase of :data:`AREAS` that describes the problem."""

    @property
    def record(self) -> str:
        """Expected answer: JSON without spaces, because fewer tokens are learned in fewer steps."""
        values = {"area": self.area, "product": self.product, "urgent": self.urgent}
        return json.dumps(values, separators=(",", ":"))


def tickets(split: Split) -> list[Ticket]:
    """Generate all tickets of a split. No message occurs twice, within a split or in both."""
    generator = random.Random(1)
    tickets: dict[str, Ticket] = {}
    while len(tickets) < ROWS["test"]:
        ticket = _draw(generator, held_out=len(tickets) % 2 == 1)
        tickets.setdefault(ticket.message, ticket)
    if split == "test":
        return list(tickets.values())
    generator = random.Random(0)
    while len(tickets) < ROWS["test"] + ROWS["train"]:
        ticket = _draw(generator, held_out=False)
        tickets.setdefault(ticket.message, ticket)
    return list(tickets.values())[ROWS["test"] :]


def write(path: Path, split: Split = "train") -> Path:
    """Write a split as JSONL of chat messages, and return the path."""
    return write_rows(
        path,
        (
            {
                "messages": [
                    {"role": "user", "content": ticket.message},
                    {"role": "assistant", "content": ticket.record},
                ]
            }
            for ticket in tickets(split)
        ),
    )


def _draw(generator: random.Random, *, held_out: bool) -> Ticket:
    """Generate one ticket; ``held_out``: with a wording used only in the test split."""
    area = _choose(generator, tuple(AREAS))
    wordings = AREAS[area].held_out if held_out else AREAS[area].training
    wording, product = _choose(generator, wordings), _choose(generator, PRODUCTS)
    urgent = generator.random() < 0.5
    return Ticket(
        message=_message(
            generator, wording.format(p=product), _choose(generator, URGENT if urgent else CALM)
        ),
        area=area,
        product=product,
        urgent=urgent,
        wording=wording,
    )


def _message(generator: random.Random, problem: str, deadline: str) -> str:
    """Combine the sentences of a message in one of four orders."""
    order = int(generator.random() * 4)
    if order == 0:
        return f"{_choose(generator, GREETINGS)}, {problem} {deadline}"
    problem = problem[0].upper() + problem[1:]
    if order == 1:
        return f"{_choose(generator, GREETINGS)}! {deadline} {problem}"
    if order == 2:
        return f"{problem} {deadline} {_choose(generator, SIGN_OFFS)}"
    return f"{deadline} {problem}"


def _choose(generator: random.Random, items: Sequence[_Item]) -> _Item:
    """Choose one item; ``Random.choice`` may differ between versions of Python."""
    return items[int(generator.random() * len(items))]
