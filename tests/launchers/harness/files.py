"""A custom harness task on rows of tests.conftest.write_sums."""

from __future__ import annotations

import importlib.util
from pathlib import Path

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None
NO_HARNESS = "lm-eval is not installed here: extra `eval`"
SUMS = """\
task: sums
dataset_path: json
dataset_kwargs:
  data_files: {test: sums.jsonl}
test_split: test
output_type: multiple_choice
doc_to_text: "{{instruction}}\\n{{input}}\\n"
doc_to_target: 0
doc_to_choice: "{{[output, output | upper]}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def write_task(folder: Path, text: str = SUMS, name: str = "sums.yaml") -> Path:
    """Write the file of the task; its rows are in sums.jsonl next to it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name
