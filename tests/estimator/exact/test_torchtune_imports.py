"""torchtune imports next to current torchao, without loading ``datasets``, which still works when called."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.optional import require_torchtune

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
from torchao.quantization import NF4Tensor
from torchtune.modules.peft.lora import to_nf4
import torch
print(type(to_nf4(torch.ones(256, 256))) is NF4Tensor)
from torchtune.training import get_quantizer_mode
print(get_quantizer_mode(None))
"""


@pytest.mark.slow
def test_a_rank_imports_datasets_only_when_torchtune_calls_its_functions(tmp_path: object) -> None:
    require_torchtune()
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-4:] == ["[]", "True ['a row']", "True", "None"], done.stdout
    assert "torchao" not in done.stderr
