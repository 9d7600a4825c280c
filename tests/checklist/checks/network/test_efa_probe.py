"""The EFA loopback test of a host, with a tool that prints recorded output."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from checklist.checks.network import efa_probe

# Of efa_test.sh, from a public log
RECORDED = """bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
64      10      =10      1.2k        0.02s      0.08     803.40       0.00
256     10      =10      5k          0.00s     30.66       8.35       0.12
1k      10      =10      20k         0.00s    128.00       8.00       0.12
4k      10      =10      80k         0.00s    490.54       8.35       0.12
64k     10      =10      1.2m        0.00s   4566.97      14.35       0.07
1m      10      =10      20m         0.00s  15397.59      68.10       0.01
"""
CLIENT = """case "$*" in *localhost*) ;; *) exec sleep 60 ;; esac
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first in PATH; a program written there as fi_pingpong is run."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(efa_probe, "_SERVER_FIRST_S", 0.0)
    monkeypatch.setattr(efa_probe, "_CLIENT_S", 1.0)
    return tmp_path / "fi_pingpong"


def write(tool: Path, script: str) -> None:
    tool.write_text(f"#!/bin/sh\necho $FI_EFA_ENABLE_SHM_TRANSFER $* >> {tool}.log\n{CLIENT}{script}\n")
    tool.chmod(0o755)


def test_the_bandwidth_of_the_largest_message_over_efa_is_reported(tool: Path) -> None:
    write(tool, f"cat <<'END'\n{RECORDED}END")
    assert efa_probe.loopback(lambda: None) == ([pytest.approx(15.39759)], None)
    (server, client) = sorted(
        Path(f"{tool}.log").read_text().splitlines(), key=lambda line: "localhost" in line
    )
    assert server.startswith("0 -e rdm -p efa -B ")
    assert client.startswith("0 -e rdm -p efa -P ")
    assert server.split()[-1] == client.split()[-2], "one port"


def test_the_reason_after_three_failed_attempts_is_the_last_line_of_the_tool(tool: Path) -> None:
    write(tool, "echo 'fi_getinfo(): util/pingpong.c:1500, ret=-61 (No data available)' >&2; exit 61")
    begun: list[None] = []
    with pytest.raises(OSError, match=r"ended with 61: fi_getinfo\(\): .*\(No data available\)"):
        efa_probe.loopback(lambda: begun.append(None))
    assert len(begun) == 3


def test_a_hanging_tool_is_ended_with_its_child_processes(
    tool: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efa_probe, "_ATTEMPTS", 1)
    write(tool, "exec sleep 60")
    begin = time.monotonic()
    with pytest.raises(OSError, match="did not end within 1 s"):
        efa_probe.loopback(lambda: None)
    assert time.monotonic() - begin < 10


def test_tool_output_without_measurements_is_an_error(tool: Path) -> None:
    write(tool, "exit 0")
    with pytest.raises(OSError, match="printed no figures"):
        efa_probe.loopback(lambda: None)


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efa_probe, "TOOL", "fi_pingpong_that_is_nowhere")
    with pytest.raises(OSError, match=r"^there is no fi_pingpong"):
        efa_probe.loopback(lambda: None)
