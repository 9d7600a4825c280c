"""``from metaflow import gpu_profile`` and ``--with gpu_profile``, in flows that import nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.decorators.conftest import Home

PAGE = Path(__file__).parents[3] / "docs" / "gpu-profile.md"
PLAIN = """
from metaflow import FlowSpec, step

class PlainFlow(FlowSpec):
    @step
    def start(self):
        self.next(self.end)

    @step
    def end(self):
        pass

if __name__ == "__main__":
    PlainFlow()
"""


def documented() -> str:
    """The complete flow of docs/gpu-profile.md."""
    found = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found[1]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    (tmp_path / ".metaflow").mkdir()
    (tmp_path / "my_flow.py").write_text(documented())
    (tmp_path / "plain.py").write_text(PLAIN)
    return Home(tmp_path)


@pytest.mark.slow
def test_the_documented_flow_runs_and_measures(home: Home) -> None:
    done = home.python("my_flow.py", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert home.artifacts("MyFlow", "start", "measured")["measured"].host_peak_bytes > 0


@pytest.mark.slow
def test_by_its_name_it_measures_a_flow_that_imports_nothing_of_ours(home: Home) -> None:
    done = home.python("plain.py", "run", "--with", "gpu_profile:interval=2")
    assert done.returncode == 0, done.stdout + done.stderr
    card = home.python("plain.py", "card", "get", "start", "card.html", "--id", "finetune")
    assert card.returncode == 0, card.stderr
    wrong = home.python("plain.py", "run", "--with", "gpu_profile:every=2")
    assert wrong.returncode != 0
    assert "@gpu_profile has no argument every." in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_beside_a_strangers_module_a_flow_that_uses_it_ends_in_two_lines(home: Home) -> None:
    (home.path / "decorators.py").write_text("")
    done = home.python("my_flow.py", "run")
    assert (done.returncode, done.stdout) == (2, "")
    wrong, _ = done.stderr.splitlines()
    assert wrong == (
        f"`import decorators` finds {home.path / 'decorators.py'}, "
        "which is not metaflow-finetune's decorators."
    )


@pytest.mark.slow
def test_beside_a_strangers_module_another_flow_runs_and_the_name_behind_with_is_answered(home: Home) -> None:
    (home.path / "decorators.py").write_text("")
    assert home.python("plain.py", "run").returncode == 0
    done = home.python("plain.py", "run", "--with", "gpu_profile")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2].startswith("`import decorators` finds ")
    assert "Traceback" not in done.stderr
