"""Conversation on the terminal: read messages and commands, print answers as they are generated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from estimator.errors import UserError
from estimator.formatting import format_count, printable
from estimator.names import did_you_mean
from estimator.terminal import print
from launchers.inference.conversation import Conversation, Reply, read_image

COMMANDS = {
    "/reset": "forget the conversation",
    "/system TEXT": "set the system prompt and forget the conversation; without TEXT, remove it",
    "/image PATH": "show an image with the next message, to a vision-language model",
    "/help": "list these commands",
    "/quit": "end (or Ctrl-D); Ctrl-C stops an answer",
}
_PROMPT = "you> "


def talk(
    conversations: Sequence[Conversation],
    read_message: Callable[[str], str] = input,
    *,
    images: Sequence[bytes] = (),
) -> None:
    """Read messages until the end of the input, and print each model's answers.

    Parameters
    ----------
    conversations:
        One for each model; all get the same messages, and each keeps its own answers.
    images:
        Encoded images of the first message.
    """
    _note(f"{conversations[0].loaded.name}: {', '.join(_commands(conversations))}")
    pending = list(images)
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
        if message.startswith("/") and _run_command(message, conversations, pending):
            continue
        if message:
            _answer(message, conversations, pending)
            pending.clear()


def once(conversations: Sequence[Conversation], message: str, images: Sequence[bytes] = ()) -> None:
    """Print the answers to one message to standard output, and nothing else."""
    for conversation in conversations:
        if len(conversations) > 1:
            print(f"{conversation.loaded.name}> ", end="")
        _stream(conversation, message, images)


def _note(text: str) -> None:
    """Print a message to standard error; standard output contains only answers."""
    print(text, file=sys.stderr, flush=True)


def _commands(conversations: Sequence[Conversation]) -> dict[str, str]:
    """Return the commands by name, ``/image`` only for a model that processes images."""
    sees_images = conversations[0].loaded.vision is not None
    return {
        name: purpose for name, purpose in COMMANDS.items() if sees_images or not name.startswith("/image")
    }


def _run_command(message: str, conversations: Sequence[Conversation], pending: list[bytes]) -> bool:
    """Execute a command; return False if the message is none: a path such as ``/etc/hosts`` belongs to it."""
    name, _, argument = message.partition(" ")
    if name == "/help":
        _note("\n".join(f"{command:<14}{purpose}" for command, purpose in _commands(conversations).items()))
    elif name in ("/reset", "/system"):
        for conversation in conversations:
            conversation.reset()
            if name == "/system":
                conversation.system = argument.strip() or None
        _note("The conversation is forgotten." if name == "/reset" else "The system prompt is set.")
    elif name == "/image":
        _attach(argument.strip(), conversations, pending)
    elif name[1:].isalpha():
        commands = _commands(conversations)
        hint = did_you_mean(name, [command.partition(" ")[0] for command in commands], 1)
        _note(f"There is no command {name}. {hint or 'Commands: ' + ', '.join(commands)}")
    else:
        return False
    return True


def _attach(path: str, conversations: Sequence[Conversation], pending: list[bytes]) -> None:
    """Add an image to those of the next message."""
    try:
        conversations[0].check_sees_images()
        pending.append(read_image(Path(path)))
    except UserError as error:
        _note(str(error))
    else:
        _note(f"The next message shows {format_count(len(pending), 'image')}.")


def _answer(message: str, conversations: Sequence[Conversation], images: Sequence[bytes]) -> None:
    lengths = [len(conversation.messages) for conversation in conversations]
    for conversation in conversations:
        if len(conversations) > 1 or sys.stdout.isatty():
            print(f"{conversation.loaded.name}> ", end="", flush=True)
        try:
            reply = _stream(conversation, message, images)
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


def _stream(conversation: Conversation, message: str, images: Sequence[bytes]) -> Reply:
    show = printable if sys.stdout.isatty() else str

    def write(piece: str) -> None:
        sys.stdout.write(show(piece))
        sys.stdout.flush()

    reply = conversation.ask(message, write, images=images)
    write("\n")
    if not reply.text.strip():
        _note("(empty answer)")
    return reply
