"""The conversation on the terminal: commands, interrupts, control characters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from launchers.inference import terminal
from launchers.inference.conversation import Conversation, LoadedModel, Reply, Sampling


class Echo(Conversation):
    """Answers with its prompt, and is interrupted by a prompt that requests it."""

    def check_sees_images(self) -> None:
        """Accept images."""

    def ask(
        self, text: str, on_text: Callable[[str], None] = lambda _: None, *, images: Sequence[bytes] = ()
    ) -> Reply:
        if text == "interrupt" and self.loaded.name == "base":
            raise KeyboardInterrupt
        answer = f"{self.system}: {text}" + f" about {len(images)} image(s)" * bool(images)
        answer = " \n" if text == "be silent" else answer
        on_text(answer)
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return Reply(text=answer, tokens=1, seconds=1.0, prompt_tokens=1)


def conversations(*names: str) -> list[Conversation]:
    loaded = [LoadedModel(name=name, model=None, tokenizer=None) for name in names]
    return [Echo(loaded=each, sampling=Sampling()) for each in loaded]


def typed(*lines: str) -> Callable[[str], str]:
    remaining: Iterator[str] = iter(lines)

    def read(_: str) -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise EOFError from None

    return read


def test_each_model_gets_every_message_and_commands_are_not_sent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = conversations("tuned", "base")
    terminal.talk(both, typed("one", "/system Be kind", "", "two", "/help", "/etc/hosts is empty", "/ x"))
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "tuned> None: one",
        "base> None: one",
        "tuned> Be kind: two",
        "base> Be kind: two",
        "tuned> Be kind: /etc/hosts is empty",
        "base> Be kind: /etc/hosts is empty",
        "tuned> Be kind: / x",
        "base> Be kind: / x",
    ]
    assert "/reset" in shown.err
    assert "/image" not in shown.err
    terminal.talk(both, typed("/reset", "/quit", "never"))
    assert [each.messages for each in both] == [[], []]


def test_an_unknown_command_is_not_sent_and_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    (tuned,) = conversations("tuned")
    terminal.talk([tuned], typed("/quitt", "/zzz with words"))
    shown = capsys.readouterr()
    assert "There is no command /quitt. Did you mean /quit?\n" in shown.err
    assert "There is no command /zzz. Commands: /reset, /system TEXT, /help, /quit\n" in shown.err
    assert shown.out == ""
    assert tuned.messages == []


def test_an_empty_answer_is_reported_without_changing_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.once(conversations("tuned"), "be silent")
    terminal.once(conversations("tuned"), "hello")
    shown = capsys.readouterr()
    assert shown.out == " \n\nNone: hello\n"
    assert shown.err == "(empty answer)\n"


def test_an_interrupted_answer_is_removed_from_the_conversations_of_all_models(
    capsys: pytest.CaptureFixture[str],
) -> None:
    both = conversations("tuned", "base")
    terminal.talk(both, typed("one", "interrupt"))
    assert [len(each.messages) for each in both] == [2, 2]
    assert "Stopped" in capsys.readouterr().err


def test_control_characters_of_an_answer_do_not_reach_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x1b]0;title\x07\r\n\tb\x9b\u202ec \u200d"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    terminal.once(conversations("tuned"), text)
    assert capsys.readouterr().out == "None: a\\x1b]0;title\\x07\\r\n\tb\\x9b\\u202ec \u200d\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    terminal.once(conversations("tuned"), text)
    assert text in capsys.readouterr().out


def test_images_are_attached_to_the_next_message_only_and_a_wrong_path_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 4), "red").save(tmp_path / "red.png")
    lines = (f"/image {tmp_path / 'red.png'}", "/image missing.png", "both", "none")
    terminal.talk(conversations("tuned"), typed(*lines), images=[b"first"])
    shown = capsys.readouterr()
    assert shown.out.splitlines() == ["None: both about 2 image(s)", "None: none"]
    assert "Image missing.png cannot be read: No such file or directory.\nGive a PNG" in shown.err
