import logging
from pathlib import Path

import pytest

from launchers.dataset import python_docs, rows


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_docs.write(tmp_path_factory.mktemp("docs") / "python-docs.jsonl")


def test_the_dataset_has_thousands_of_chats_with_unique_questions_and_short_answers(path: Path) -> None:
    conversations = list(rows.read(path))
    assert 3000 < len(conversations) < 10_000
    assert all([m.role for m in c.messages] == ["user", "assistant"] for c in conversations)
    for position in (0, 1):
        assert len({c.messages[position].content for c in conversations}) == len(conversations)
    assert all(20 <= len(c.messages[1].content) <= python_docs.MAX_ANSWER_CHARS for c in conversations)


def test_the_dataset_is_independent_of_other_packages_and_reading_prints_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def shout(self: logging.Logger) -> None:
        """Log in capitals, like a third-party extension of the logger."""

    monkeypatch.setattr(logging.Logger, "shout", shout, raising=False)
    monkeypatch.setenv("PYTHONHASHSEED", "99")
    assert python_docs.write(tmp_path / "again.jsonl").read_bytes() == path.read_bytes()
    assert capfd.readouterr() == ("", "")


def test_a_known_function_is_asked_about_and_answered(path: Path) -> None:
    answers = {c.messages[0].content: c.messages[1].content for c in list(rows.read(path))}
    (question,) = (q for q in answers if "`bisect.bisect_left" in q)
    assert answers[question].startswith("Return the index where to insert item x in list a")


@pytest.mark.parametrize(
    ("doc", "answer"),
    [
        ("Short.\n\nMore of it.", "Short.\n\nMore of it."),
        ("Say it.\n\n>>> f()\n1", "Say it."),
        ("One sentence. " * 60, ("One sentence. " * 42).strip()),
        ("word " * 300, ("word " * 119).strip()),
        ("First.\n\n" + "long " * 200, "First."),
    ],
)
def test_an_answer_is_the_first_complete_sentences_of_the_docstring(doc: str, answer: str) -> None:
    assert python_docs._answer(doc) == answer
