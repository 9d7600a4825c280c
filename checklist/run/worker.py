"""Worker process of one rank: executes its node agent's commands, during which it may hang or die.

Commands are JSON lines on standard input, ``{"id", "what", "arguments"}``; replies go to the pipe whose
number is in CHECKLIST_PIPE: ``{"kind": "done", "id", "reply"}``, or ``"failed"`` with the error. Libraries
may print to standard output, which is a log file.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checklist.checks.collectives import flight
from checklist.probing.context import DIRECTORY, PARENT, PIPE, Context
from launchers.cluster.processes import die_with_parent

Message = dict[str, Any]


class ReplyPipe:
    """Pipe to the node agent, written by two threads: commands and traces."""

    def __init__(self, pipe: int) -> None:
        self._pipe = os.fdopen(pipe, "wb", buffering=0)
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Write a whole message."""
        with self._lock:
            self._pipe.write(json.dumps(message).encode() + b"\n")


def run(context: Context, channel: ReplyPipe, command: Message) -> None:
    """Execute one command and always send a reply."""
    kind = command["what"]
    context.progress.name(str(command.get("operation") or kind))
    try:
        reply = _commands()[kind](context, **command.get("arguments", {}))
    except Exception as error:  # noqa: BLE001 - reported to the node agent
        lines = str(error).strip().splitlines() or [""]
        text = f"{type(error).__name__}: {lines[0][:500]}"
        channel.send({"kind": "failed", "id": command["id"], "error": text})
    else:
        channel.send({"kind": "done", "id": command["id"], "reply": reply})


def _commands() -> dict[str, Callable[..., Any]]:
    # Modules are imported on their first command, because some need torch.
    from checklist.checks.collectives import corruption_probe, pairs_probe, screen_probe, world_probe
    from checklist.checks.gpu import dcgm_probe, gpus_probe
    from checklist.checks.host import counters, facts_probe
    from checklist.checks.network import mesh_probe, open_ports_probe
    from checklist.checks.storage import storage_probe
    from checklist.run import node_checks

    return {
        "facts": facts_probe.gather,
        "health": gpus_probe.health,
        "counters": counters.read,
        "listen": mesh_probe.listen,
        "reach": mesh_probe.reach,
        "diagnose": dcgm_probe.diagnose,
        "open": open_ports_probe.open_some,
        "knock": open_ports_probe.knock,
        "close": open_ports_probe.close,
        "local": node_checks.measure,
        "repeat": corruption_probe.repeat,
        "remove": storage_probe.remove,
        "store": world_probe.store,
        "join": world_probe.join,
        "leave": world_probe.leave,
        "correct": world_probe.correct,
        "time": world_probe.timed,
        "transport": world_probe.transport,
        "screen": screen_probe.screen,
        "send": pairs_probe.send,
        "exchange": pairs_probe.exchange,
    }


def main() -> None:
    """Serve until standard input ends."""
    die_with_parent(int(os.environ[PARENT]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the node agent handles Ctrl-C
    context, channel = Context(Path(os.environ[DIRECTORY])), ReplyPipe(int(os.environ[PIPE]))
    commands: queue.Queue[Message] = queue.Queue()
    threading.Thread(
        target=_read, args=(context, channel, commands), name="checklist-read", daemon=True
    ).start()
    while True:  # until the other thread ends the process
        run(context, channel, commands.get())


def _read(context: Context, channel: ReplyPipe, commands: queue.Queue[Message]) -> None:
    """Queue the commands from standard input; end the process with it, or if a command cannot be read.

    Skips the clean-up of libraries, which may wait for other ranks.
    """
    status = 0
    try:
        for line in sys.stdin.buffer:
            command = json.loads(line)
            if command["what"] == "trace":  # asked while the main thread is stuck
                channel.send({"kind": "trace", "record": flight.read()})
            elif command["what"] == "count":
                context.progress.restart()
            else:
                commands.put(command)
    except Exception:  # noqa: BLE001 a thread that has ended would leave the process waiting for ever
        traceback.print_exc()
        status = 1
    os._exit(status)


if __name__ == "__main__":
    main()
