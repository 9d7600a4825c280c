from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.dataset.files import BadRow
from launchers.dataset.preferences import (
    from_conversations,
    judged_from_pairs,
    parse,
    parse_judged,
    read_judged,
)
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import Message
from tests.launchers.dataset.test_rows import turns, write

USER = {"role": "user", "content": "1+2?"}
BETTER, WORSE = {"role": "assistant", "content": "3"}, {"role": "assistant", "content": "4"}
QUESTION = ("user", "1+2?")
PLAIN = {"prompt": "1+2?", "chosen": "3", "rejected": "4"}
HUMAN, HH = {"from": "human", "value": "1+2?"}, "\n\nHuman: 1+2?\n\nAssistant: "


def gpt(answer: str) -> dict[str, str]:
    return {"from": "gpt", "value": answer}


def ranked(answer: str, rank: int) -> dict[str, Any]:
    return {"answer": answer, "rank": rank}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        (PLAIN, [QUESTION]),
        (PLAIN | {"system": "Be brief.", "id": 7}, [("system", "Be brief."), QUESTION]),
        ({"prompt": [USER], "chosen": [BETTER], "rejected": [WORSE]}, [QUESTION]),
        ({"prompt": [USER], "chosen": "3", "rejected": "4"}, [QUESTION]),
        ({"chosen": [USER, BETTER], "rejected": [USER, WORSE]}, [QUESTION]),
        ({"prompt": "1+2?", "chosen": [USER, BETTER], "rejected": [USER, WORSE]}, [QUESTION]),
        ({"chosen": HH + "3", "rejected": HH + "4"}, [QUESTION]),
        (
            {"chosen": [USER, BETTER, USER, BETTER], "rejected": [USER, BETTER, USER, WORSE]},
            [QUESTION, ("assistant", "3"), QUESTION],
        ),
        ({"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4"}, [("user", "Add.\n\n1 2")]),
        (
            {"instruction": "1+2?", "history": [["Hi", "Hello"]], "chosen": "3", "rejected": "4"},
            [("user", "Hi"), ("assistant", "Hello"), QUESTION],
        ),
        ({"conversations": [HUMAN], "chosen": gpt("3"), "rejected": gpt("4")}, [QUESTION]),
        ({"instruction": "1+2?", "output": ["3", "4"]}, [QUESTION]),
        ({"messages": [USER], "chosen": BETTER, "rejected": WORSE}, [QUESTION]),
        ({"instruction": "1+2?", "chosen_response": "3", "rejected_response": "4"}, [QUESTION]),
        ({"prompt": "1+2?", "answers": [ranked("5", 2), ranked("4", 3), ranked("3", 1)]}, [QUESTION]),
    ],
)
def test_every_format_of_a_preference_pair_is_read(
    row: dict[str, Any], prompt: list[tuple[str, str]]
) -> None:
    pair = parse(row, 5)
    assert turns(pair.chosen) == [*prompt, ("assistant", "3")]
    assert turns(pair.rejected) == [*prompt, ("assistant", "4")]
    assert pair.line == 5


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "1+2?", "chosen": "3"}, "no `rejected` answer"),
        ({"prompt": "1+2?", "chosen": "3", "rejected": ""}, "no `rejected` answer"),
        ({"prompt": "1+2?", "chosen_response": "3"}, "no `rejected_response` answer"),
        (PLAIN | {"rejected": "3"}, "are equal: there is nothing to prefer"),
        ({"chosen": "3", "rejected": "4"}, "without a prompt"),
        ({"prompt": "1+2?", "completion": "3"}, "no `chosen` and `rejected`, but `prompt`, `completion`"),
        ({"chosen": [USER, BETTER], "rejected": [USER, BETTER, USER, WORSE]}, "before their last turn"),
        (
            {"prompt": "2+2?", "chosen": [USER, BETTER], "rejected": [USER, WORSE]},
            "do not begin with `prompt`",
        ),
        ({"prompt": [USER], "chosen": [BETTER, BETTER], "rejected": "4"}, "2 turns"),
        ({"prompt": [USER], "chosen": USER, "rejected": "4"}, "a turn of 'user'"),
        ({"prompt": [USER, BETTER], "chosen": "3", "rejected": "4"}, "last turn must be the user's"),
        ({"prompt": "1+2?", "chosen": 3, "rejected": "4"}, "`chosen` is not text but int"),
        ({"instruction": "1+2?", "output": ["3"]}, "`output` holds 1 answers"),
        ({"prompt": "1+2?", "answers": [{"answer": "3", "rank": 1}]}, "no two of different `rank`"),
        ({"prompt": "1+2?", "answers": ["3", "4"]}, r"answers\[0\] has no `answer` and `rank`"),
        ({"prompt": "1+2?", "answers": [{"answer": "3"}]}, r"answers\[0\] has no `answer` and `rank`"),
        ({"instruction": "1+2?", "history": ["Hi"], "chosen": "3", "rejected": "4"}, r"history\[0\]"),
        ([PLAIN], "a JSON list"),
    ],
)
def test_an_unusable_pair_is_refused_with_the_reason(row: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        parse(row)


def test_pairs_made_from_chats_have_the_answer_in_capitals_as_the_rejected_one() -> None:
    chat = Conversation(
        messages=(Message(role="user", content="Hi"), Message(role="assistant", content="Hello")), line=3
    )
    loud = Conversation(
        messages=(Message(role="user", content="Hi"), Message(role="assistant", content="OK")), line=4
    )
    (pair,) = from_conversations([chat, loud, Conversation(text="plain")])
    assert pair.chosen == chat
    assert turns(pair.rejected) == [("user", "Hi"), ("assistant", "HELLO")]
    assert pair.line == 3


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+2?", "completion": "3", "label": True},
        {"prompt": [USER], "completion": [BETTER], "label": True},
        {"messages": [USER, BETTER], "kto_tag": True},
        {"conversations": [USER, BETTER], "label": True},
        {"instruction": "1+2?", "output": "3", "kto_tag": True},
    ],
)
def test_every_format_of_a_judged_answer_is_read(row: dict[str, Any]) -> None:
    judged = parse_judged(row, 4)
    assert turns(judged.conversation) == [QUESTION, ("assistant", "3")]
    assert judged.desirable
    assert judged.line == 4


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "1+2?", "completion": "3"}, "no `label`"),
        ({"prompt": "1+2?", "completion": "3", "label": "yes"}, '`label` is "yes", not true or false'),
        ({"prompt": "1+2?", "label": True}, "`label` without an answer"),
        ({"prompt": "1+2?", "completion": "", "kto_tag": True}, "`completion` is empty"),
    ],
)
def test_an_unusable_judged_answer_is_refused_with_the_reason(row: Any, reason: str) -> None:
    with pytest.raises(BadRow, match=reason):
        parse_judged(row)


def test_judged_answers_with_identical_labels_are_refused(tmp_path: Path) -> None:
    row = {"prompt": "1+2?", "completion": "3", "label": True}
    with pytest.raises(UserError, match="every `label` is true"):
        list(read_judged(write(tmp_path / "all.jsonl", row, row)))
    assert len(list(read_judged(write(tmp_path / "both.jsonl", row, row | {"label": False})))) == 2


def test_a_pair_becomes_one_desirable_and_one_undesirable_answer() -> None:
    good, bad = judged_from_pairs([parse(PLAIN)])
    assert (good.desirable, bad.desirable) == (True, False)
    assert turns(bad.conversation) == [QUESTION, ("assistant", "4")]
