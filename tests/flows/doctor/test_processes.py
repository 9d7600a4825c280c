"""Probes in separate processes: failing ones are reported in one line, slow ones end at their limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.doctor.probes import Probe
from flows.doctor.processes import run_probes

PROBES = {
    "raises": "raise ValueError('first\\nsecond')",
    "leaves": "raise SystemExit(3)",
    "dies": "import os; print('last words', flush=True); os._exit(7)",
    "hangs": "import time; time.sleep(600)",
    "secret": "raise ValueError('it is s3cr3t-value')",
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in PROBES.items():
        (tmp_path / f"probe_that_{name}.py").write_text(f"def probe():\n    {text}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "s3cr3t-value")


def probe_that(name: str, limit_s: float = 60) -> Probe:
    return Probe(name=name, section="", function=f"probe_that_{name}:probe", limit_s=limit_s)


@pytest.mark.usefixtures("modules")
def test_a_failing_probe_is_reported_in_one_line_and_the_others_continue() -> None:
    probe_lines = run_probes([probe_that(name, 2 if name == "hangs" else 60) for name in PROBES])
    lines = {probe.name: line for probe, (line,) in probe_lines}
    assert set(lines) == set(PROBES)
    assert (lines["raises"].found, lines["leaves"].found) == ("ValueError: first", "SystemExit: 3")
    assert lines["dies"].found == "the probe ended with status 7: last words"
    assert (lines["secret"].found, lines["hangs"].found) == ("ValueError: it is ***", "no result within 2 s")
    assert lines["hangs"].state == "unknown"
    assert {line.state for name, line in lines.items() if name != "hangs"} == {"no"}
