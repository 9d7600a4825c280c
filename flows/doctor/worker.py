"""Run one probe: ``python -m flows.doctor.worker REQUEST``; writes its lines next to the request."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from flows.doctor.line import Line
from flows.doctor.probes import Probe
from launchers.cluster.processes import PARENT, die_with_parent

ANSWER = "answer.json"


def lines_of(probe: Probe) -> list[Line]:
    """Return the probe's lines; an exception becomes a line, too."""
    try:
        return probe.run()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - anything that is installed may be broken
        return [of_error(probe.name, error)]


def of_error(check: str, error: BaseException) -> Line:
    """Convert an exception to a line: a UserError's text, else the type and the first line of the message."""
    problem = getattr(error, "problem", None)
    if problem is not None:
        return Line(check=check, state="no", found=problem, fix=getattr(error, "advice", ""))
    message = next((row for row in str(error).splitlines() if row.strip()), "")
    return Line(check=check, state="no", found=f"{type(error).__name__}: {message}".rstrip(": "))


def main() -> None:
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    request = Path(sys.argv[1])
    values = json.loads(request.read_text())
    lines = lines_of(Probe(**{**values, "arguments": tuple(values["arguments"])}))
    unfinished = request.with_name("answer.new")
    unfinished.write_text(json.dumps([asdict(line) for line in lines]))
    unfinished.rename(request.with_name(ANSWER))
    sys.stdout.flush()
    os._exit(0)  # skip threads and exit handlers of imported packages


if __name__ == "__main__":
    main()
