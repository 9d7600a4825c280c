"""torchtune is imported without what loads datasets, and loads datasets all the same when it is asked to."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import launchers.engines.torchtune.recipe
print([name for name in ("datasets", "pandas", "pyarrow") if name in sys.modules])
import json, pathlib, torchtune.data._utils
file = pathlib.Path(sys.argv[1]) / "rows.jsonl"
file.write_text(json.dumps({"text": "a row"}))
rows = torchtune.data._utils.load_dataset("json", data_files=str(file), split="train", cache_dir=sys.argv[1])
import datasets
print(type(rows) is datasets.Dataset, rows["text"][:])
"""


def test_a_rank_imports_no_dataset_loader_and_torchtune_still_has_it(tmp_path: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[]", "True ['a row']"], done.stdout
