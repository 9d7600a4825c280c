"""``finetune runs``: finished runs beside each other."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.flows.conftest import STEPS, FlowRun

ROOT = Path(__file__).parents[2]


def _finetune(*words: str, cwd: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "estimator.cli.app", "runs", *words],
        cwd=cwd,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_finished_run_is_in_the_table_on_the_page_and_in_json(
    finished_run: Callable[[str, str, int], FlowRun], tmp_path: Path
) -> None:
    run = finished_run("torchtune", "lora", 2)
    page = tmp_path / "runs.html"
    table = _finetune(cwd=run.home, env=run.environment)
    assert table.returncode == 0, table.stderr
    assert run.run_id in table.stdout
    assert "held-out loss, before -> after" in table.stdout
    assert "held-out loss while training" in table.stdout
    as_json = _finetune("--json", "--html", str(page), run.run_id, cwd=run.home, env=run.environment)
    assert as_json.returncode == 0, as_json.stderr
    (record,) = json.loads(as_json.stdout)
    assert record["state"] == "finished"
    assert [metrics["step"] for metrics in record["metrics"]] == list(range(1, STEPS + 1))
    assert record["measured"]["steps"] == STEPS
    assert record["evaluations"][-1]["step"] == STEPS
    encoded = re.search(r'__MF_DATA__\["[^"]*"\] = "([^"]+)"', page.read_text())
    assert encoded
    assert run.run_id in base64.b64decode(encoded[1]).decode()


def test_where_no_run_is_it_says_so_in_two_lines(tmp_path: Path) -> None:
    (tmp_path / ".metaflow").mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env = kept | {"METAFLOW_DEFAULT_DATASTORE": "local", "METAFLOW_DEFAULT_METADATA": "local"}
    for words in ((), ("123",)):
        done = _finetune(*words, cwd=tmp_path, env=env)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 2, done.stderr
        assert "FinetuneFlow" in done.stderr
