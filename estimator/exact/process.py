"""Traces in a child process, so that the calling process never imports torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from estimator.errors import UserError
from estimator.exact.result import ExactEstimate, Moment
from estimator.setup import Setup
from estimator.vocabulary import ENGINES

WORKER = ["-m", "estimator.exact.worker"]


def trace(setups: Sequence[Setup], time_limit_s: float) -> list[ExactEstimate]:
    """Trace all setups in one child process. Raises UserError on failure or after ``time_limit_s``."""
    for package in ("torch", *sorted({ENGINES[setup.engine].traced_with for setup in setups})):
        if find_spec(package) is None:
            raise UserError(f"exact mode needs {package}: pip install 'metaflow-finetune[train]'")
    request = json.dumps([asdict(setup) for setup in setups])
    with subprocess.Popen(
        [sys.executable, *WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    ) as child:
        try:
            stdout, stderr = child.communicate(request, timeout=time_limit_s)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"Exact mode took longer than {time_limit_s:.0f} s.",
                "Raise the time limit, or remove --exact: the formulas need no trace.",
            ) from None
        finally:
            _kill(child)
    lines = stdout.splitlines()
    if child.returncode != 0 or not lines:
        messages = stderr.strip().splitlines()
        raise UserError(
            f"The trace failed: {messages[-1] if messages else f'exit code {child.returncode}'}",
            "Remove --exact: the formulas need no trace.",
        )
    response = json.loads(lines[-1])
    if "problem" in response:
        raise UserError(response["problem"], response["advice"])
    return [_estimate(values) for values in response["estimates"]]


def _environment() -> dict[str, str]:
    """Return an environment without GPU and network, with few threads: a trace computes nothing."""
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _kill(child: subprocess.Popen[str]) -> None:
    """Kill the child and its descendants; the child leads their session."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def setup_from(values: dict[str, Any]) -> Setup:
    """Restore a Setup from the values of ``dataclasses.asdict``."""
    from pydantic import TypeAdapter

    setup: Setup = TypeAdapter(Setup).validate_python(values)
    return setup


def _to_tuple(value: Any) -> Any:
    return tuple(_to_tuple(item) for item in value) if isinstance(value, list) else value


def _estimate(values: dict[str, Any]) -> ExactEstimate:
    moments = tuple(
        Moment(name=name, parts=tuple(parts.items())) for name, parts in values.pop("moments").items()
    )
    states = tuple(values.pop("states").items())
    versions = tuple(values.pop("versions").items())
    return ExactEstimate(
        moments=moments,
        states=states,
        versions=versions,
        **{name: _to_tuple(value) for name, value in values.items()},
    )
