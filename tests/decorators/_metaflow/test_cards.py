"""Pages of a card are made where the step runs, and after the cause of a failure is said."""

from __future__ import annotations

from tests.decorators.conftest import Home

# Notes, on standard error, each page that is stored and each process that is started for one.
_NOTES = """
import sys
def note(event, args):
    if event == "os.rename" and "blank-finetune" in str(args[1]) and str(args[1]).endswith(".html"):
        print("a page is stored", file=sys.stderr, flush=True)
    if event == "subprocess.Popen" and "card" in args[1]:
        print("a process for a page", file=sys.stderr, flush=True)
sys.addaudithook(note)
"""


def _said(home: Home, *words: str) -> str:
    """What a run says whose train step has a card."""
    (home.path / "sitecustomize.py").write_text(_NOTES)
    return home.run(
        "profiled.py", "run", "--steps=3", "--of-steps=3", *words, PYTHONPATH=str(home.path)
    ).stdout


def test_the_last_page_of_a_step_that_ends_well_needs_no_process(home: Home) -> None:
    said = _said(home)
    assert "a page is stored" in said
    assert "a process for a page" not in said


def test_a_failure_is_said_before_its_page_is_made(home: Home) -> None:
    said = _said(home, "--fail=train")
    assert 0 < said.index("ValueError: the loss is not a number") < said.index("a page is stored")
    assert "a process for a page" not in said
