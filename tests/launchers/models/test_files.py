"""Incomplete or invalid checkpoints."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import pytest

from estimator.errors import UserError
from launchers.models import files
from launchers.models.files import check_complete


class TestCheckComplete:
    def test_a_complete_checkpoint_in_one_file_or_several_is_accepted(
        self, complete_model: Path, sharded: Path
    ) -> None:
        check_complete(complete_model)
        check_complete(sharded)

    def test_weights_of_another_format_are_named(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(UserError, match=r"pytorch_model\.bin"):
            check_complete(folder)

    @pytest.mark.parametrize("share", [0.999999, 0.0001])
    def test_a_truncated_file_is_named_with_both_sizes(self, folder: Path, share: float) -> None:
        path = folder / "model.safetensors"
        size = path.stat().st_size
        os.truncate(path, int(size * share))
        with pytest.raises(UserError, match=rf"model\.safetensors is truncated: {int(size * share):,} of"):
            check_complete(folder)

    def test_weights_that_are_not_floating_point_numbers_are_named(self, folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content.replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
        with pytest.raises(UserError, match="is of type I32, which cannot be trained") as refused:
            check_complete(folder)
        assert "qlora" in refused.value.advice

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("config.json", b"{"),
            ("config.json", b"[]"),
            ("generation_config.json", b""),
            ("tokenizer_config.json", b'{"a": "\xe9"}'),
        ],
    )
    def test_invalid_json_is_named(self, folder: Path, name: str, content: bytes) -> None:
        (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=re.escape(name)) as refused:
            check_complete(folder)
        assert refused.value.advice == "Fetch it again."

    @pytest.mark.parametrize(
        "content",
        [
            *(b"", b"12345678", b"hello, I am a web page"),
            *(struct.pack("<Q", 4) + b"nope", struct.pack("<Q", 2) + b"[]"),
        ],
    )
    def test_a_file_that_is_not_safetensors_is_refused(self, folder: Path, content: bytes) -> None:
        (folder / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match="is not a safetensors file"):
            check_complete(folder)

    def test_a_file_with_trailing_bytes_is_refused(self, folder: Path) -> None:
        with (folder / "model.safetensors").open("ab") as file:
            file.write(b"more")
        with pytest.raises(UserError, match="is broken"):
            check_complete(folder)

    def test_a_header_of_the_maximum_length_is_accepted(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (length,) = struct.unpack("<Q", (folder / "model.safetensors").read_bytes()[:8])
        monkeypatch.setattr(files, "_MAX_HEADER_BYTES", length)
        check_complete(folder)
        monkeypatch.setattr(files, "_MAX_HEADER_BYTES", length - 1)
        with pytest.raises(UserError, match="is not a safetensors file"):
            check_complete(folder)

    def test_a_git_lfs_pointer_is_recognized(self, folder: Path) -> None:
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        (folder / "model.safetensors").write_text(pointer)
        with pytest.raises(UserError) as error:
            check_complete(folder)
        assert "git lfs pull" in error.value.advice

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("model-00002-of-00002.safetensors", "1 of 2 weight files are missing, model-00002"),
            ("model.safetensors.index.json", r"model-00001-of-00002\.safetensors, one part of the weights"),
        ],
    )
    def test_a_missing_shard_or_index_is_named(self, sharded: Path, name: str, reason: str) -> None:
        (sharded / name).unlink()
        with pytest.raises(UserError, match=reason):
            check_complete(sharded)

    def test_a_tensor_that_no_shard_holds_is_named(self, sharded: Path) -> None:
        path = sharded / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00002.safetensors"
        path.write_text(json.dumps(index))
        with pytest.raises(UserError, match=r"model\.layers\.9"):
            check_complete(sharded)

    @pytest.mark.parametrize("field", ["vocab_size", "hidden_size"])
    def test_weights_of_another_shape_than_the_config_are_refused(self, folder: Path, field: str) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {field: 128}))
        with pytest.raises(UserError, match=rf"\[4096, 256\].*{field} 128"):
            check_complete(folder)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [("model.safetensors", "No weights in"), ("config.json", "config"), ("tokenizer.json", "tokenizer")],
    )
    def test_a_missing_file_is_named(self, folder: Path, name: str, reason: str) -> None:
        (folder / name).unlink()
        with pytest.raises(UserError, match=reason):
            check_complete(folder)
