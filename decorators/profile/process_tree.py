"""Resource usage of a step's processes: this one and all descendants, without another local node's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil


class ProcessTree:
    """This process and its descendants, without those of another node's local task.

    torch's elastic agent starts each rank in a new session; ranks are still descendants.
    """

    def __init__(self, foreign: tuple[str, ...] = ()) -> None:
        self._root = psutil.Process()
        self._foreign = foreign
        self._is_foreign: dict[int, bool] = {}
        self._cpu: dict[psutil.Process, float] = {}
        self.cpu_seconds = 0.0  # CPU time of the tree since the first sample

    def sample(self) -> int:
        """Return the resident bytes of the tree; updates :attr:`cpu_seconds`."""
        rss = 0
        first = not self._cpu
        cpu: dict[psutil.Process, float] = {}
        for process in self.processes():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss += process.memory_info().rss
            except psutil.Error:
                continue
            cpu[process] = times.user + times.system
            if not first:
                self.cpu_seconds += max(0.0, cpu[process] - self._cpu.get(process, 0.0))
        self._cpu = cpu
        return rss

    def pss(self, on_read: Callable[[], None] = lambda: None) -> int | None:
        """Return the proportional set size of the tree; None if the kernel does not report it.

        For a process with gigabytes of pages the kernel may need a second, so ``on_read`` is called before
        each process, for work that cannot wait for all of them.
        """
        total = 0
        for process in self.processes():
            on_read()
            try:
                text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            except OSError:
                return None
            total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
        return total or None

    def processes(self) -> list[psutil.Process]:
        try:
            children = self._root.children(recursive=True)
        except psutil.Error:
            return [self._root]
        excluded: set[int] = set()
        for child in children:  # parents are listed before their children
            try:
                parent = child.ppid()
            except psutil.Error:
                continue
            if parent in excluded or (parent == self._root.pid and self._belongs_elsewhere(child)):
                excluded.add(child.pid)
        return [self._root, *(child for child in children if child.pid not in excluded)]

    def _belongs_elsewhere(self, child: psutil.Process) -> bool:
        if not self._foreign:
            return False
        if child.pid not in self._is_foreign:
            try:
                command = child.cmdline()
            except psutil.Error:
                return False
            if command == self._root.cmdline():
                return False  # between fork and exec
            self._is_foreign[child.pid] = all(word in command for word in self._foreign)
        return self._is_foreign[child.pid]
