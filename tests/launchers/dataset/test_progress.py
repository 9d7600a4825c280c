import pytest

from launchers.dataset import progress
from launchers.dataset.progress import Progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, as its last item."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[-1])
    return now


def test_a_line_has_rows_share_and_the_time_that_is_left(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    said = Progress("tokenizing", 200_000)
    for seconds, done in ((4, 20_000), (6, 50_000), (8, 70_000), (300, 100_000)):
        clock.append(100.0 + seconds)
        said.at(done)
    assert capsys.readouterr().err.splitlines() == [
        "tokenizing: 50,000 of 200,000 rows, 25%, 18 s left",
        "tokenizing: 100,000 of 200,000 rows, 50%, 5 min left",
    ]


def test_where_no_total_is_known_the_share_of_the_file_tells(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    said = Progress("reading d.jsonl")
    clock.append(110.0)
    said.at(7, lambda: 0.1)
    clock.append(120.0)
    said.at(8, lambda: 0.0)
    assert capsys.readouterr().err.splitlines() == [
        "reading d.jsonl: 7 rows, 10%, 90 s left",
        "reading d.jsonl: 8 rows",
    ]
