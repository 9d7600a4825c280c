"""A conversation on the terminal: reads messages and commands, prints answers as they are generated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from estimator.errors import UserError
from estimator.formatting import printable
from estimator.terminal import print
from launchers.inference.conversation import Conversation, Reply

COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system prompt and forget the conversation; without TEXT, remove it",
    "/help": "list these commands",
    "/quit": "end (or Ctrl-D); Ctrl-C stops an answer",
}
_PROMPT = "you> "


def talk(conversations: Sequence[Conversation], read_message: Callable[[str], str] = input) -> None:
    """Read messages until the end of the input, and print each model's answers.

    ``conversations``: one for each model; all get the same messages, and each keeps its own answers.
    """
    _note(f"{conversations[0].loaded.name}: {', '.join(COMMANDS)}")
    while True:
        try:
            line = read_message(_PROMPT if sys.stdin.isatty() else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            _note("")
            return
        message = line.strip()
        if message == "/quit":
            return
        if message.startswith("/") and _obey(message, conversations):
            continue
        if message:
            _answer(message, conversations)


def once(conversations: Sequence[Conversation], message: str) -> None:
    """Print the answers to one message to standard output, and nothing else."""
    for conversation in conversations:
        if len(conversations) > 1:
            print(f"{conversation.loaded.name}> ", end="")
        _stream(conversation, message)


def _note(text: str) -> None:
    """Print a remark to standard error; standard output contains only answers."""
    print(text, file=sys.stderr, flush=True)


def _obey(message: str, conversations: Sequence[Conversation]) -> bool:
    """Carry out a command; False if there is none of that name, so that it is a message."""
    name, _, argument = message.partition(" ")
    if name == "/help":
        _note("\n".join(f"{command:<14}{purpose}" for command, purpose in COMMANDS.items()))
    elif name in ("/reset", "/system"):
        for conversation in conversations:
            conversation.reset()
            if name == "/system":
                conversation.system = argument.strip() or None
        _note("The conversation is forgotten." if name == "/reset" else "The system prompt is set.")
    else:
        return False
    return True


def _answer(message: str, conversations: Sequence[Conversation]) -> None:
    lengths = [len(conversation.messages) for conversation in conversations]
    for conversation in conversations:
        if len(conversations) > 1 or sys.stdout.isatty():
            print(f"{conversation.loaded.name}> ", end="", flush=True)
        try:
            reply = _stream(conversation, message)
        except KeyboardInterrupt:
            print(flush=True)
            for item, length in zip(conversations, lengths, strict=True):
                del item.messages[length:]
            _note("Stopped; this message is forgotten.")
            return
        except UserError as error:
            print(flush=True)
            _note(str(error))
            return
        if reply.dropped:
            _note(f"The oldest {reply.dropped} messages did not fit into the model's context.")


def _stream(conversation: Conversation, message: str) -> Reply:
    show = printable if sys.stdout.isatty() else str

    def write(piece: str) -> None:
        sys.stdout.write(show(piece))
        sys.stdout.flush()

    reply = conversation.ask(message, write)
    write("\n")
    return reply
