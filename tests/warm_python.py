"""A Python process that imports slow packages once and forks a child for each script of a test."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SERVER = """
import importlib, json, os, runpy, sys, traceback

for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setsid()
            os.chdir(request["folder"])
            os.environ.clear()
            os.environ.update(request["environment"])
            for descriptor, name in enumerate((request["stdin"], request["stdout"], request["stderr"])):
                opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
                os.dup2(opened, descriptor)
            sys.argv = request["words"]
            sys.path[0] = os.path.dirname(sys.argv[0])
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
                if isinstance(stop.code, str):
                    print(stop.code, file=sys.stderr)
            except BaseException:
                traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.killpg(child, 9)
        left = True
    except ProcessLookupError:
        left = False
    print(json.dumps({"status": status, "left": left}), flush=True)
"""


class WarmPython:
    """Run scripts as ``python SCRIPT ARGUMENTS``, without importing ``modules`` again for each.

    Packages that read the environment on import see that of ``environment``, not that of a single script.
    """

    def __init__(self, *modules: str, environment: dict[str, str], folder: Path) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER, *modules],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> WarmPython:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(60)

    def run(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        environment: dict[str, str],
        timeout: float = 180,
        merge: bool = False,
        message: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run the script ``arguments[0]``, which may leave no process.

        ``merge``: send stderr to stdout. ``message``: standard input.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as outputs:
            stdout, stderr = Path(outputs, "stdout"), Path(outputs, "stdout" if merge else "stderr")
            Path(outputs, "stdin").write_text(message)
            request = {
                "stdin": str(Path(outputs, "stdin")),
                "words": list(arguments),
                "folder": os.fspath(folder),
                "environment": environment,
                "stdout": str(stdout),
                "stderr": str(stderr),
            }
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            with selectors.DefaultSelector() as ready:
                ready.register(self._server.stdout, selectors.EVENT_READ)
                if not ready.select(timeout):
                    self._server.kill()
                    raise subprocess.TimeoutExpired(list(arguments), timeout)
            reply = json.loads(self._server.stdout.readline())
            assert not reply["left"], f"{arguments} left a process behind"
            errors = "" if merge else stderr.read_text()
            return subprocess.CompletedProcess(list(arguments), reply["status"], stdout.read_text(), errors)
