"""Secrets in the errors of steps: not printed, not stored."""

from __future__ import annotations

import pytest

from decorators._metaflow.masked_errors import with_asterisks
from tests.decorators.conftest import Home
from tests.flows.marked_secrets import SECRETS, files_below, leaks

REFUSED = "refused: " + " ".join(["***"] * len(SECRETS))


@pytest.mark.slow
def test_a_failed_steps_exception_leaves_no_secret_in_log_datastore_card_or_home(home: Home) -> None:
    own_home = home.path / "home"
    own_home.mkdir()
    arguments = ("run", "--names", ",".join(SECRETS), "--caught", "true")
    done = home.run("leaking.py", *arguments, HOME=str(own_home), **SECRETS)
    assert done.returncode == 1
    printed = done.stdout + done.stderr
    assert "RuntimeError: no upload: " + with_asterisks(REFUSED) in printed
    assert f"RefusedError: {REFUSED}" in printed, "@catch prints, too"
    assert leaks([("output", printed.encode()), *files_below(home.path)]) == []

    caught = home.artifacts("LeakingFlow", "start", "error")["error"]
    assert (caught.exception, REFUSED in str(caught)) == (REFUSED, True)
    places = leaks(files_below(home.path / ".metaflow"), ["no upload: refused: "])
    assert any("decompressed" in place for place in places), "artifact of the failed step"
    assert any(place.endswith(".html") for place in places), "its card"
