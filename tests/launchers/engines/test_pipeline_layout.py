"""Folders of an exported pipeline from the base and the trained components."""

from __future__ import annotations

import json
from pathlib import Path

from launchers.engines._pipeline_layout import KOHYA, LORA, WEIGHTS, lay_out, weight_files

PARTS = (
    "diffusion_pytorch_model-00001-of-00002.safetensors",
    "diffusion_pytorch_model-00002-of-00002.safetensors",
)


def written(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{folder.name}/{name}")
    return folder


def base(folder: Path) -> Path:
    """A pipeline like the Stable Diffusion XL repository: each network twice, once in half precision."""
    return written(
        folder,
        "model_index.json",
        "unet/config.json",
        f"unet/{WEIGHTS}",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "vae/config.json",
        f"vae/{WEIGHTS}",
        ".cache/huggingface/x",
    )


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_the_trained_unet_replaces_both_weight_files_of_the_base_unet(tmp_path: Path) -> None:
    output = written(tmp_path / "output", f"model/unet/{WEIGHTS}")
    lay_out(output, base(tmp_path / "base"), tmp_path / "out")
    assert files(tmp_path / "out" / "model") == {
        "model_index.json": "base/model_index.json",
        "unet/config.json": "base/unet/config.json",
        f"unet/{WEIGHTS}": f"output/model/unet/{WEIGHTS}",
        "vae/config.json": "base/vae/config.json",
        f"vae/{WEIGHTS}": f"base/vae/{WEIGHTS}",
    }
    assert not (tmp_path / "out" / "adapter").exists()


def test_a_lora_only_export_has_both_formats_and_no_pipeline(tmp_path: Path) -> None:
    output = written(tmp_path / "output", f"adapter/{LORA}", f"adapter/{KOHYA}")
    lay_out(output, base(tmp_path / "base"), tmp_path / "out")
    assert set(files(tmp_path / "out")) == {f"adapter/{LORA}", f"adapter/{KOHYA}"}


def test_a_unet_merged_into_several_files_keeps_its_index(tmp_path: Path) -> None:
    folder = written(tmp_path / "base", "model_index.json", *(f"unet/{name}" for name in PARTS))
    index = {"weight_map": {"one": PARTS[0], "two": PARTS[1]}}
    (folder / "unet" / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(folder / "unet")] == list(PARTS)
    output = written(tmp_path / "output", *(f"model/unet/{name}" for name in PARTS))
    lay_out(output, folder, tmp_path / "out")
    names = files(tmp_path / "out" / "model")
    assert names[f"unet/{PARTS[0]}"].startswith("output/")
    assert f"unet/{WEIGHTS}.index.json" in names


def test_leftovers_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    written(tmp_path / "out", "model/old.txt", "adapter/old.txt")
    lay_out(written(tmp_path / "output", f"adapter/{LORA}"), base(tmp_path / "base"), tmp_path / "out")
    assert set(files(tmp_path / "out")) == {f"adapter/{LORA}"}


def test_merged_text_encoders_replace_those_of_the_base(tmp_path: Path) -> None:
    model = base(tmp_path / "base")
    written(model, "text_encoder/config.json", "text_encoder/model.safetensors", "text_encoder_2/config.json")
    written(model, "text_encoder_2/model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (model / "text_encoder_2" / "model.safetensors.index.json").write_text(json.dumps(index))
    output = written(tmp_path / "output", f"model/unet/{WEIGHTS}", "model/text_encoder/model.safetensors")
    written(output, "model/text_encoder_2/model-00001-of-00002.safetensors")
    lay_out(output, model, tmp_path / "whole")
    names = files(tmp_path / "whole" / "model")
    assert names["text_encoder/model.safetensors"].startswith("output/")
    assert names["text_encoder_2/model-00001-of-00002.safetensors"].startswith("output/")
    assert json.loads(names["text_encoder_2/model.safetensors.index.json"]) == index, (
        "the names are the base's"
    )
    assert names["text_encoder/config.json"] == "base/text_encoder/config.json"
    assert names[f"vae/{WEIGHTS}"].startswith("base/")
