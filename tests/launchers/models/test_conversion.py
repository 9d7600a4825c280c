from pathlib import Path

from launchers.models import conversion


def test_conversion_sources_are_the_model_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "photo.png"):
        (tmp_path / name).touch()
    (tmp_path / "old.safetensors").mkdir()
    assert [path.name for path in conversion._files_to_convert(tmp_path)] == [
        "config.json",
        "model.safetensors",
    ]
