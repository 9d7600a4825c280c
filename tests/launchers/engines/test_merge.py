"""Merging an adapter into a base, tensor by tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from launchers.engines import _merge  # noqa: E402

ROOT = Path(__file__).parents[3]
MIB = 2**20


@pytest.fixture
def base(tmp_path: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(0)
    paths = []
    for number in (1, 2):
        tensors = {
            f"layer.{number}.weight": torch.randn(6, 4, generator=generator).bfloat16(),
            f"layer.{number}.norm": torch.randn(3, generator=generator),
            f"layer.{number}.count": torch.tensor(7),
            f"layer.{number}.empty": torch.empty(0, 4),
        }
        paths.append(tmp_path / f"model-{number}.safetensors")
        save_file(tensors, paths[-1], metadata={"format": "pt", "from": f"file {number}"})
    return paths


def load(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*") for name, tensor in load_file(path).items()}


def test_unchanged_tensors_are_copied_to_files_of_the_same_names(base: list[Path], tmp_path: Path) -> None:
    _merge.merge(base, tmp_path / "out", lambda _, weight: weight)
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [path.name for path in base]
    for path in base:
        before, after = load_file(path), load_file(tmp_path / "out" / path.name)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype
            assert torch.equal(tensor, after[name])
        with safe_open(path, "pt") as one, safe_open(tmp_path / "out" / path.name, "pt") as other:
            assert one.metadata() == other.metadata()


def test_tensors_can_change_in_value_and_type_or_be_omitted(base: list[Path], tmp_path: Path) -> None:
    def change(name: str, weight: torch.Tensor) -> torch.Tensor | None:
        if name.endswith("count"):
            return None
        return weight.float().t() + 1 if name == "layer.2.weight" else weight

    before = [path.read_bytes() for path in base]
    _merge.merge(base, tmp_path / "out", change)
    after = load(tmp_path / "out")
    assert sorted(after) == sorted(
        f"layer.{n}.{part}" for n in (1, 2) for part in ("weight", "norm", "empty")
    )
    expected_weight = load_file(base[1])["layer.2.weight"].float().t() + 1
    assert torch.equal(after["layer.2.weight"], expected_weight)
    assert after["layer.1.weight"].dtype == torch.bfloat16
    assert [path.read_bytes() for path in base] == before


def test_a_failed_merge_leaves_no_partial_file_and_the_next_merge_starts_over(
    base: list[Path], tmp_path: Path
) -> None:
    def change(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name == "layer.2.weight":
            raise OSError("no space left")
        return weight

    with pytest.raises(OSError, match="no space left"):
        _merge.merge(base, tmp_path / "out", change)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model-1.safetensors"]
    (tmp_path / "out" / "model-9.safetensors").touch()  # of a base that was cut otherwise
    _merge.merge(base, tmp_path / "out", lambda _, weight: weight)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [path.name for path in base]


# A model of 3 files of some 50 MB; the adapter has rank 8 on every linear layer. Prints the resident memory
# before the merge, and its peak while it lasted, mapped pages included.
MERGE = """
import ctypes, json, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from launchers.settings import Settings

def resident(name):
    lines = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return int(lines[name].split()[0]) * 1024

folder, out = map(Path, sys.argv[1:])
layers, parts, width, middle, heads = 18, 3, 512, 2048, 8
config = LlamaConfig(vocab_size=512, hidden_size=width, intermediate_size=middle, num_hidden_layers=layers,
                     num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=128)
with torch.device("meta"):
    shapes = LlamaForCausalLM(config).state_dict()
from safetensors.torch import save_file
folder.mkdir()
config.save_pretrained(folder)
for part in range(parts):
    tensors = {
        name: torch.full(tensor.shape, 0.01, dtype=torch.bfloat16)
        for name, tensor in shapes.items()
        if (int(name.split(".")[2]) * parts // layers if ".layers." in name else 0) == part
    }
    save_file(tensors, folder / f"model-{part + 1:05d}-of-{parts:05d}.safetensors", {"format": "pt"})
    del tensors
linear = [name for name in shapes if "proj" in name]
from launchers.engines.loop import export
adapter = out / "adapter"
adapter.mkdir(parents=True)
tensors = {}
for name in linear:
    rows, columns = shapes[name].shape
    stem = "base_model.model." + name.removesuffix(".weight")
    tensors[stem + ".lora_A.weight"] = torch.full((8, columns), 0.5, dtype=torch.bfloat16)
    tensors[stem + ".lora_B.weight"] = torch.full((rows, 8), 0.5, dtype=torch.bfloat16)
save_file(tensors, adapter / "adapter_model.safetensors")
(adapter / "adapter_config.json").write_text(json.dumps({"r": 8, "lora_alpha": 16}))
del tensors
torch.ones(8, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)  # loads the kernels
ctypes.CDLL(None).malloc_trim(0)  # so that no freed memory hides what the merge takes
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = resident("VmRSS")
export.merge(folder, adapter, out / "model")
print(json.dumps({"before": before, "peak": resident("VmHWM"), "linear": len(linear)}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_merge_needs_less_memory_than_one_and_a_half_files_of_the_base(tmp_path: Path) -> None:
    folder = tmp_path / "base-of-150-mb"
    done = subprocess.run(
        [sys.executable, "-c", MERGE, str(folder), str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    measured_peak = json.loads(done.stdout.splitlines()[-1])
    shards = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(shards) == 3
    assert min(shards) > 45 * MIB
    assert measured_peak["peak"] - measured_peak["before"] < 1.5 * max(shards)
    merged, base = load(tmp_path / "out" / "model"), {}
    for path in folder.glob("*.safetensors"):
        base |= load_file(path)
    assert merged.keys() == base.keys()
    changed = [name for name in base if not torch.equal(merged[name], base[name])]
    assert len(changed) >= measured_peak["linear"]
