"""Loopback messages over EFA, with the parameters of the EFA installer's test (efa_test.sh)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from checklist.measurements import NO_TOOL
from launchers.cluster.endpoint import unused_port

TOOL = "fi_pingpong"
_INSTALLED = "/opt/amazon/efa/bin"  # install location, which is not on every PATH
_ATTEMPTS = 3  # from efa_test.sh, like the next three
_CLIENT_S = 8.0
_SERVER_FIRST_S = 0.5
_OVER_EFA = {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}  # else loopback uses shared memory
# bytes, #sent, #ack, total, time, MB/sec: the last is 10^6 bytes a second
_ROW = re.compile(r"^\s*(\d+[kmg]?)\s+\S+\s+=?\S+\s+\S+\s+[\d.]+s\s+([\d.]+)\s", re.MULTILINE)
_MB = 1e-3  # in GB


def devices() -> int:
    """Count the devices with driver efa."""
    drivers = Path("/sys/class/infiniband").glob("*/device/driver")
    return sum(driver.resolve().name == "efa" for driver in drivers)


def loopback(on_start: Callable[[], None]) -> tuple[list[float], str | None]:
    """Measure GB/s of the largest message (the note is None); ``on_start`` is called before each attempt.

    Raises OSError with the tool's last message if all attempts failed.
    """
    tool = shutil.which(TOOL) or shutil.which(TOOL, path=_INSTALLED)
    if tool is None:
        raise OSError(f"{NO_TOOL} {TOOL}")
    problem = ""
    for _ in range(_ATTEMPTS):
        on_start()
        output, problem = _attempt(tool)
        rows = _ROW.findall(output)
        if rows and not problem:
            return [float(rows[-1][1]) * _MB], None
    raise OSError(problem or f"{TOOL} printed no figures")


def _attempt(tool: str) -> tuple[str, str]:
    """Run the client once; return its output and its error (empty on success)."""
    port, environment = str(unused_port()), {**os.environ, **_OVER_EFA}
    command = [tool, "-e", "rdm", "-p", "efa"]
    with subprocess.Popen(
        [*command, "-B", port], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            time.sleep(_SERVER_FIRST_S)
            client = subprocess.run(
                [*command, "-P", port, "localhost"],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_CLIENT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "", f"{TOOL} did not end within {_CLIENT_S:g} s"
        finally:
            server.kill()
    if not client.returncode:
        return client.stdout, ""
    lines = [line.strip() for line in (client.stderr or client.stdout).splitlines() if line.strip()]
    return client.stdout, f"{TOOL} ended with {client.returncode}" + (f": {lines[-1]}" if lines else "")
