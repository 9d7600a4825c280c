"""The progress of a rank, as read by another process."""

from __future__ import annotations

import threading

from checklist.probing.progress import Progress


def test_progress_is_read_by_another_thread_while_the_writer_is_busy(tmp_path: object) -> None:
    path = tmp_path / "rank0.progress"  # type: ignore[operator]
    reader = Progress(path, create=True)

    def write() -> None:
        writer = Progress(path)
        writer.name("all_reduce")
        for _ in range(5):
            writer.begin()

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert reader.read() == ("all_reduce", 5)
