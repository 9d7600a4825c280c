"""`finetune estimate` as a test calls it."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from estimator import models
from estimator.cli.app import app
from estimator.cli.options import SetupOptions
from estimator.cli.steps import setup_from
from estimator.setup import Setup


def run(*words: str) -> Result:
    return CliRunner().invoke(app, ["estimate", *words], prog_name="finetune")


def answer(*words: str) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def setup(gpus: int = 1, **values: Any) -> Setup:
    model = values.pop("model", "llama-8b")
    return setup_from(SetupOptions(model=model, **values), models.find(model), gpus)
