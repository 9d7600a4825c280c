"""``pytorch_model*.bin`` is read as tensors only and converted once to safetensors."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from estimator.errors import UserError
from estimator.models import locate
from launchers.models import pickled, weights
from launchers.models.files import check_complete, pickled_files

Tensors = dict[str, torch.Tensor]
INDEX = "pytorch_model.bin.index.json"


@pytest.fixture
def tensors(complete_model: Path) -> Tensors:
    return load_file(complete_model / "model.safetensors")


@pytest.fixture
def folder(complete_model: Path, tmp_path: Path, tensors: Tensors) -> Path:
    """A folder of the user with only pytorch_model.bin."""
    mine = Path(shutil.copytree(complete_model, tmp_path / "mine"))
    (mine / "model.safetensors").unlink()
    torch.save(OrderedDict(tensors), mine / "pytorch_model.bin")
    return mine


def shard(folder: Path, tensors: Tensors) -> list[str]:
    """Split the weights into two files with an index."""
    names = sorted(tensors)
    weight_map = {}
    (folder / "pytorch_model.bin").unlink()
    for number, part in enumerate((names[:20], names[20:]), start=1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(set(weight_map.values()))


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fetch(folder: Path, tmp_path: Path) -> Path:
    return weights.fetch(locate(str(folder)), tmp_path / "cache" / "model")


def same(folder: Path, tensors: Tensors) -> bool:
    loaded: Tensors = {}
    for path in folder.glob("*.safetensors"):
        loaded |= load_file(path)
    return loaded.keys() == tensors.keys() and all(
        torch.equal(loaded[name], tensors[name]) for name in tensors
    )


def test_a_users_folder_is_converted_into_the_cache_and_left_unchanged(
    folder: Path, complete_model: Path, tensors: Tensors, tmp_path: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    converted = fetch(folder, tmp_path)
    assert converted.parent == tmp_path / "cache"
    assert names_in(converted) == names_in(complete_model) | {".converted_from.json"}
    assert same(converted, tensors)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_model_in_several_files_is_converted_file_by_file_with_an_index(
    folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    shard(folder, tensors)
    converted = fetch(folder, tmp_path)
    assert {path.name for path in converted.glob("model*")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }
    assert same(converted, tensors)


def test_a_pickled_model_is_converted_once_and_again_if_its_file_has_changed(
    folder: Path, tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    read = pickled.read
    monkeypatch.setattr(pickled, "read", lambda path: (reads.append(path), read(path))[1])
    first = fetch(folder, tmp_path)
    assert fetch(folder, tmp_path) == first
    assert len(reads) == 1
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    torch.save(tensors, folder / "pytorch_model.bin")
    later = (first / ".converted_from.json").stat().st_mtime_ns + 1_000_000_000
    os.utime(folder / "pytorch_model.bin", ns=(later, later))
    assert same(fetch(folder, tmp_path), tensors)
    assert len(reads) == 2


def test_two_folders_with_the_same_name_are_converted_separately(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other" / "mine"))
    assert fetch(folder, tmp_path) != fetch(other, tmp_path)


def test_safetensors_files_are_preferred_to_pickled_ones(
    folder: Path, complete_model: Path, tmp_path: Path
) -> None:
    shutil.copy(complete_model / "model.safetensors", folder)
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    assert fetch(folder, tmp_path) == folder
    assert not (tmp_path / "cache").exists()


def test_a_tied_head_is_written_once_under_the_name_of_the_embeddings(tmp_path: Path) -> None:
    embedding, norm = torch.randn(8, 4), torch.randn(4)
    tensors = {"model.embed_tokens.weight": embedding, "norm": norm, "lm_head.weight": embedding}
    file = tmp_path / "pytorch_model.bin"
    torch.save(tensors, file)
    kept_tensors = pickled._deduplicated(file, pickled.read(file))
    assert list(kept_tensors) == ["model.embed_tokens.weight", "norm"]


def test_views_and_transposed_tensors_are_converted_with_their_values(
    folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    both = torch.randn(1536, 256)
    for number, name in enumerate(("gate_proj", "up_proj")):
        tensors[f"model.layers.0.mlp.{name}.weight"] = both[number * 768 : (number + 1) * 768]
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.randn(768, 256).T
    tensors["model.layers.1.mlp.down_proj.weight"] = both[:768].view(256, 768)
    torch.save(tensors, folder / "pytorch_model.bin")
    assert same(fetch(folder, tmp_path), tensors)


def test_a_file_written_by_torch_before_1_6_is_read(folder: Path, tensors: Tensors, tmp_path: Path) -> None:
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(fetch(folder, tmp_path), tensors)


class Code:
    """An object whose pickle runs a command when loaded unsafely."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def zipped(value: dict[str, Any], path: Path) -> None:
    torch.save(value, path)


def plain(value: dict[str, Any], path: Path) -> None:
    path.write_bytes(pickle.dumps(value["more"], protocol=2))  # the protocol that torch writes


@pytest.mark.parametrize("save", [zipped, plain])
def test_code_in_a_pickle_is_refused_and_does_not_run(
    folder: Path, tensors: Tensors, tmp_path: Path, save: Callable[[dict[str, Any], Path], None]
) -> None:
    save({**tensors, "more": Code(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds more than tensors") as caught:
        fetch(folder, tmp_path)
    assert "system" in caught.value.problem
    assert str(folder / "pytorch_model.bin") in caught.value.problem
    assert "\n" not in caught.value.problem
    assert caught.value.advice
    assert not (tmp_path / "ran").exists()
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"state_dict": {"model.norm.weight": torch.ones(2)}}, "'state_dict' as a dict"),
        ([torch.ones(2)], "a list"),
        ({"model.norm.weight": torch.ones(2).to_sparse()}, "'model.norm.weight'"),
    ],
)
def test_anything_but_names_and_tensors_is_refused(
    folder: Path, tmp_path: Path, value: object, expected: str
) -> None:
    torch.save(value, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=re.escape(expected)):
        fetch(folder, tmp_path)


def test_a_broken_second_shard_leaves_no_converted_files(
    folder: Path, tensors: Tensors, tmp_path: Path
) -> None:
    names = shard(folder, tensors)
    torch.save({"model.norm.weight": "text"}, folder / names[1])
    with pytest.raises(UserError, match=names[1]):
        fetch(folder, tmp_path)
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is not a PyTorch file"),
        (b"hello, I am a web page", "is not a PyTorch file"),
        (b"\x80\x02 no pickle", "cannot be read"),
        (pickle.dumps({"a": [1] * 9}, protocol=2)[:-8], "cannot be read"),
        (pickle.dumps({"a": Code(Path("ran"))}), "cannot be read"),  # in a protocol that torch doesn't write
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
def test_a_file_that_is_not_a_pickled_model_is_refused(
    folder: Path, tmp_path: Path, content: bytes, expected: str
) -> None:
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(UserError, match=expected):
        fetch(folder, tmp_path)


def test_a_truncated_file_is_refused_when_the_folder_is_inspected(folder: Path) -> None:
    path = folder / "pytorch_model.bin"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match=r"pytorch_model\.bin is truncated"):
        check_complete(folder)


def test_a_missing_shard_listed_in_the_index_is_named(folder: Path, tensors: Tensors) -> None:
    names = shard(folder, tensors)
    (folder / names[1]).unlink()
    with pytest.raises(UserError, match=f"1 of 2 weight files are missing, {names[1]}"):
        check_complete(folder)


def test_variant_files_in_another_precision_are_ignored(folder: Path) -> None:
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model.fp16.bin")
    assert pickled_files(folder) == []
    with pytest.raises(UserError, match="No weights in"):
        check_complete(folder)
