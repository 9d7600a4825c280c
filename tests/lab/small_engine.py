"""Runs whose ranks make steps and checkpoints without training, in seconds instead of a minute.

A run is planned, prepared and refused as any other with torchtune. Where its settings say ``SMALL``, its
ranks run :class:`tests.launchers.gang.engines.Steps`, by the option ``--engine`` of ``launchers.run.worker``,
which takes any class: nothing in the product knows of it. A ``sitecustomize`` adds the option, as the command
is the product's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

STEP_S = 0.25
SMALL = (f"engine_options.step_s={STEP_S}",)  # values of --set
_ENGINES = Path(__file__).parents[1] / "launchers" / "gang" / "engines.py"
_SITE = """
import json, sys
words = list(getattr(sys, "orig_argv", ()))
if "launchers.run.worker" in words:
    job = next(word for word in words if word.endswith("job.json"))
    if "step_s" in json.load(open(job)).get("settings", {}).get("engine_options", ()):
        sys.argv += ["--engine", "small_engine_of_tests:Steps"]
"""


def install(folder: Path) -> Path:
    """Install it into a folder on the path of the Pythons of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_ENGINES, folder / "small_engine_of_tests.py")
    (folder / "sitecustomize.py").write_text(_SITE)
    return folder
