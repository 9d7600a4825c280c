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
    snippet = re.search(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return snippet[1]


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
def test_the_decorator_by_name_measures_a_flow_that_does_not_import_the_package(home: Home) -> None:
    done = home.python("plain.py", "run", "--with", "gpu_profile:interval=2")
    assert done.returncode == 0, done.stdout + done.stderr
    card = home.python("plain.py", "card", "get", "start", "card.html", "--id", "finetune")
    assert card.returncode == 0, card.stderr
    wrong = home.python("plain.py", "run", "--with", "gpu_profile:every=2")
    assert wrong.returncode != 0
    assert "@gpu_profile has no argument every." in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_flow_that_uses_the_decorator_ends_in_two_lines_if_a_foreign_module_shadows_it(home: Home) -> None:
    (home.path / "decorators.py").write_text("")
    done = home.python("my_flow.py", "run")
    assert (done.returncode, done.stdout) == (2, "")
    wrong, _ = done.stderr.splitlines()
    assert wrong == (
        f"`import decorators` finds {home.path / 'decorators.py'}, "
        "which is not metaflow-finetune's decorators."
    )


@pytest.mark.slow
def test_other_flows_run_if_a_foreign_module_shadows_the_package_and_with_is_refused(home: Home) -> None:
    (home.path / "decorators.py").write_text("")
    assert home.python("plain.py", "run").returncode == 0
    done = home.python("plain.py", "run", "--with", "gpu_profile")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2].startswith("`import decorators` finds ")
    assert "Traceback" not in done.stderr
