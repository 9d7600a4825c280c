"""The cause of a failed run is the last message of its tasks."""

from __future__ import annotations

import pytest

from decorators._metaflow.causes import FailureCause
from tests.decorators.conftest import Home

HEAD = "[7/train/3 (pid 11)] "
FAILED = "rank 1 on vm failed: ValueError: the loss is not a number"
SCRIPT = """
import sys
from metaflow import FlowSpec, step
from decorators._metaflow import main, user_errors
from estimator.errors import UserError

class FailingFlow(FlowSpec):
    @step
    def start(self):
        with user_errors():
            raise UserError("The dataset has no rows.", "Name another one.")
        self.next(self.end)

    @step
    def end(self):
        pass

if __name__ == "__main__":
    main(FailingFlow)
"""


@pytest.mark.slow
def test_a_failed_run_ends_with_the_message_of_the_failed_task(home: Home) -> None:
    (home.path / "failing.py").write_text(SCRIPT)
    done = home.python("failing.py", "run")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == ["Error: The dataset has no rows.", "Name another one."]
    done = home.python("failing.py", "run", "--with", "retry:times=1,minutes_between_retries=0")
    assert done.stderr.splitlines()[-2:] == ["Error: The dataset has no rows.", "Name another one."]
    assert "terminal step" not in done.stdout + done.stderr
    done = home.python("failing.py", "run", "--with", "catch:print_exception=False")
    assert done.returncode == 0
    assert "The dataset has no rows." not in done.stderr, "a run that continues has not failed"


def _cause(*lines: tuple[str, str] | str) -> list[str]:
    """Return the cause after these log lines; a line without an attempt belongs to the first attempt."""
    cause = FailureCause(["Error", "Training failed"])
    for line in lines:
        head, text = (HEAD, line) if isinstance(line, str) else line
        cause.add(head, text, system=isinstance(line, str))
    return cause.lines


BLOCK = [(HEAD, text) for text in ("Training failed:", FAILED, "", "Traceback (...):", "ValueError: x")]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([*BLOCK, "Task failed."], [f"Training failed: {FAILED}"]),
        # Of a pod, and followed by Metaflow's own error
        (
            [
                *((HEAD, f"[t-1-x]    {line}") for _, line in BLOCK),
                (HEAD, "Task crashed (exit code 1)."),
                "Task failed.",
            ],
            [f"Training failed: {FAILED}"],
        ),
        # A resubmitted job: the first launch does not count
        (
            [
                *BLOCK,
                (HEAD, "[t-2] Task is starting (Pod is pending)..."),
                (HEAD, "pod t-2 failed: OOMKilled"),
                (HEAD, ""),
                "Task failed.",
            ],
            ["Step train failed: pod t-2 failed: OOMKilled"],
        ),
        ([*BLOCK, "Task failed.", "Task is starting (retry)."], []),
        (BLOCK, [f"Training failed: {FAILED}"]),  # the scheduler failed before it reported the task
        ([*BLOCK, "Task finished successfully."], []),  # a disruption before the launch that succeeded
        ([(HEAD, "ZeroDivisionError: division by zero")], []),
    ],
    ids=["block", "pod", "resubmitted", "retried", "unreported", "succeeded", "not failed"],
)
def test_the_cause_is_the_message_of_the_last_failed_launch(
    lines: list[tuple[str, str] | str], expected: list[str]
) -> None:
    assert _cause(*lines) == expected
