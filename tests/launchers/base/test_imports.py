"""Imports of large packages: the paused garbage collector, transformers without torch."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from launchers.base.imports import collector_paused, packages_hidden
from launchers.base.tokenizer import tokenizer_in
from launchers.models import tiny_llama

# Prints the tokens of a text, whether torch was imported for them, and a sum by torch
_TOKENIZES = """
import json, sys
from pathlib import Path
from launchers.base.imports import import_transformers_without_torch
from launchers.base.tokenizer import tokenizer_in

import_transformers_without_torch()
tokens = tokenizer_in(Path(sys.argv[1]))("Wait, 12 résumés?").input_ids
before = "torch" in sys.modules
import torch
print(json.dumps({"tokens": tokens, "before": before, "sum": torch.ones(2).sum().item()}))
"""

# Trains an adapter for a step and prints which packages were imported for it
_ADAPTS = """
import sys
from launchers.base.imports import import_peft, import_transformers

import_transformers()
import_peft()
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
import torch

shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=8, **shape)), LoraConfig(r=2))
tokens = torch.ones(1, 4, dtype=torch.long)
model(input_ids=tokens, labels=tokens).loss.backward()
print(sorted({"bitsandbytes", "boto3", "scipy", "torchao"} & sys.modules.keys()))
from bitsandbytes import functional
import boto3
print(functional.create_dynamic_map().numel())
"""


def test_the_collector_is_paused_and_resumed_even_if_an_import_fails() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), collector_paused():
        import_module("no_such_module")
    assert gc.isenabled()


def test_a_collector_that_was_already_stopped_stays_stopped() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_tokenizer_without_torch_gives_the_same_tokens_and_torch_can_be_imported_later(
    tmp_path: Path,
) -> None:
    folder = tiny_llama.make(tmp_path / "tiny")
    result = subprocess.run(
        [sys.executable, "-c", _TOKENIZES, str(folder)], capture_output=True, text=True, check=True
    )
    expected = {"tokens": tokenizer_in(folder)("Wait, 12 résumés?").input_ids, "before": False, "sum": 2.0}
    assert json.loads(result.stdout) == expected
    assert result.stderr == ""


def test_adapters_train_without_packages_that_can_be_imported_later() -> None:
    result = subprocess.run([sys.executable, "-c", _ADAPTS], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n256\n"


def test_transformers_that_has_found_a_package_is_imported_with_it() -> None:
    code = (
        "from transformers.utils import is_scipy_available\n"
        "found = is_scipy_available()\n"
        "from launchers.base.imports import import_transformers\n"
        "import_transformers()\n"
        "from transformers import LlamaForCausalLM\n"
        "print(found, LlamaForCausalLM.__name__)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == f"{find_spec('scipy') is not None} LlamaForCausalLM\n"


def test_an_imported_package_stays_visible_and_a_hidden_one_returns() -> None:
    with packages_hidden("json", "wave"):
        assert import_module("json") is json
        with pytest.raises(ImportError):
            import_module("wave")
    assert import_module("wave").open
