"""Layout of a trained model for transformers and peft."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from launchers.models import hf_layout


def safetensors(path: Path, tensors: dict[str, int], dtype: str = "BF16") -> Path:
    """Write a file with zeros of this many bytes per tensor."""
    header, at = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size // 2], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return path


def base(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md"):
        (folder / name).write_text("{}")
    safetensors(folder / "model.safetensors", {"old": 4})
    return folder


def test_shards_get_an_index_that_names_every_tensor_once(tmp_path: Path) -> None:
    shards = [safetensors(tmp_path / "x1", {"a": 8, "b": 4}), safetensors(tmp_path / "x2", {"c": 2})]
    hf_layout.lay_out_model(shards, base(tmp_path / "base"), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 14
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }


def test_one_file_is_linked_without_an_index_and_the_config_has_its_type(tmp_path: Path) -> None:
    weights, folder = safetensors(tmp_path / "trained", {"a": 8}, dtype="BF16"), base(tmp_path / "base")
    hf_layout.lay_out_model([weights], folder, tmp_path / "out")
    side = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == side | {"model.safetensors"}
    assert (tmp_path / "out" / "model.safetensors").samefile(weights)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "llama", "dtype": "bfloat16"}
    assert "float32" in (folder / "config.json").read_text()


def test_the_folder_of_a_tokenizer_has_no_model_config(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    hf_layout.lay_out_tokenizer(base(tmp_path / "base"), tmp_path / "new")
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names == {"tokenizer.json", "tokenizer_config.json"}


def test_an_adapter_v2_config_names_its_base_model_and_keeps_its_own_fields(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    weights = safetensors(tmp_path / "adapter" / "adapter_v2.safetensors", {"a": 8})
    (tmp_path / "adapter" / "adapter_v2.json").write_text('{"prompt_length": 7, "start_layer": 1}')
    hf_layout.lay_out_adapter_v2(tmp_path / "adapter", tmp_path / "out", base_model="owner/model")
    config = json.loads((tmp_path / "out" / "adapter_v2.json").read_text())
    assert config == {"prompt_length": 7, "start_layer": 1, "base_model_name_or_path": "owner/model"}
    assert (tmp_path / "out" / "adapter_v2.safetensors").samefile(weights)


def test_an_adapter_config_names_its_base_model(tmp_path: Path) -> None:
    weights = safetensors(tmp_path / "adapter", {"a": 8})
    hf_layout.lay_out_adapter(weights, {"r": 8}, tmp_path / "out", base_model="owner/model")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == ("owner/model", 8)


def test_only_one_of_two_copies_of_the_weights_is_merged(tmp_path: Path) -> None:
    """Mistral's repositories hold consolidated.safetensors beside transformers' own files."""
    for name in ("model-00001-of-00001.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    names = hf_layout.weight_files(tmp_path)
    assert [path.name for path in names] == ["model-00001-of-00001.safetensors"]
