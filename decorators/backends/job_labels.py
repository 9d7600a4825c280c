"""Labels of Kubernetes jobs and pods and tags of Batch jobs: user, flow, run and team.

Monitoring and cost tools group by them: ``finetune/user``, ``finetune/flow``, ``finetune/run`` and, where the
setting ``resources.team`` names one, ``finetune/team``.
"""

from __future__ import annotations

import os
import re

PREFIX = "finetune/"
TEAM_VARIABLE = "FINETUNE_TEAM"
MOST_CHARACTERS = 63  # of a label's value (Kubernetes: labels and selectors); a tag of AWS's may have 256


def note_team(team: str | None) -> None:
    """At the launch: hand the team on to the processes that make jobs."""
    if team is not None:
        os.environ[TEAM_VARIABLE] = team


def labels_of(user: str, flow: str, run: str | None) -> dict[str, str]:
    """The labels of a run's jobs, in the characters that Kubernetes takes; ``run`` None: not known yet."""
    said = {"user": user, "flow": flow, "run": run, "team": os.environ.get(TEAM_VARIABLE)}
    values = {name: label_value(text) for name, text in said.items() if text}
    return {f"{PREFIX}{name}": value for name, value in values.items() if value}


def label_value(text: str) -> str:
    """The text as a label's value: letters, digits, ``-``, ``_`` and ``.``, the first and last no sign."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:MOST_CHARACTERS]
    return plain.strip("._-")
