"""Labels of Kubernetes jobs and pods and tags of Batch jobs: user, flow, run and team.

Monitoring and cost tools group by them: ``finetune/user``, ``finetune/flow``, ``finetune/run`` and, where the
setting ``resources.team`` names one, ``finetune/team``.
"""

from __future__ import annotations

import os
import re

PREFIX = "finetune/"
TEAM_VARIABLE = "FINETUNE_TEAM"
MAX_CHARACTERS = 63  # limit of a label value (Kubernetes: labels and selectors); AWS tags allow 256


def note_team(team: str | None) -> None:
    """Pass the team on to the processes that create jobs. Called at launch."""
    if team is not None:
        os.environ[TEAM_VARIABLE] = team


def labels_of(user: str, flow: str, run: str | None) -> dict[str, str]:
    """Return the labels of a run's jobs, in characters that Kubernetes allows; ``run`` may be unknown."""
    texts = {"user": user, "flow": flow, "run": run, "team": os.environ.get(TEAM_VARIABLE)}
    values = {name: label_value(text) for name, text in texts.items() if text}
    return {f"{PREFIX}{name}": value for name, value in values.items() if value}


def label_value(text: str) -> str:
    """Convert text to a label value: letters, digits, ``-``, ``_`` and ``.``, alphanumeric at both ends."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:MAX_CHARACTERS]
    return plain.strip("._-")
