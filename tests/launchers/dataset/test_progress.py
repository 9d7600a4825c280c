import pytest

from launchers.dataset import progress
from launchers.dataset.progress import EVERY_S, Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as its last item."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    return now


def test_a_progress_line_every_five_seconds_has_rows_percentage_and_time_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    line = Progress("tokenizing", 200_000)
    for seconds, done in ((EVERY_S - 0.01, 20_000), (EVERY_S, 50_000), (8, 70_000), (300, 100_000)):
        clock.append(seconds)
        line.at(done)
    assert capsys.readouterr().err.splitlines() == [
        "tokenizing: 50,000 of 200,000 rows, 25%, 15 s left",
        "tokenizing: 100,000 of 200,000 rows, 50%, 5 min left",
    ]


def test_without_a_row_count_progress_is_the_share_of_bytes_read(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    line = Progress("reading d.jsonl")
    for seconds, done, share in ((10, 7, 0.1), (20, 8, 0.0), (40, 8, 0.01), (60, 9, 1.5)):
        clock.append(seconds)
        line.at(done, lambda share=share: share)  # type: ignore[misc]
    assert capsys.readouterr().err.splitlines() == [
        "reading d.jsonl: 7 rows, 10%, 90 s left",
        "reading d.jsonl: 8 rows",
        "reading d.jsonl: 8 rows, 1%",
        "reading d.jsonl: 9 rows, 150%, 0.0 s left",
    ]
