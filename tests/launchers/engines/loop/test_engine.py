"""Export of a finished run of the loop, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from launchers.engines.loop.engine import LoopEngine
from launchers.gang.job import TrainJob
from launchers.models import tiny_llama
from tests.launchers.engines.loop import runs

np = pytest.importorskip("numpy")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("base") / "model")


def job_with(folder: Path, base: Path, *outputs: str, **settings: object) -> TrainJob:
    """Return a finished job with these output folders."""
    job = runs.make_job(folder / "job", base, folder, steps=1, settings=settings)
    for name in outputs:
        out = job.output_dir / name
        out.mkdir(parents=True)
        file = "model.safetensors" if name == "model" else "adapter_model.safetensors"
        save_file({"lm_head.weight": np.ones((2, 2), dtype=np.float32)}, out / file)
        (out / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    return job


def test_an_exported_full_model_replaces_stale_files_and_includes_the_tokenizer(
    tmp_path: Path, base: Path
) -> None:
    out = tmp_path / "out"
    for stale in (out / "model" / "old.safetensors", out / "adapter" / "old.safetensors"):
        stale.parent.mkdir(parents=True)
        stale.touch()
    LoopEngine().collect(job_with(tmp_path, base, "model"), out)
    assert {path.name for path in out.iterdir()} == {"model"}
    names = {path.name for path in (out / "model").iterdir()}
    assert {"config.json", "tokenizer.json"} <= names
    assert "old.safetensors" not in names


@pytest.mark.parametrize(
    ("outputs", "new_tokens", "with_tokenizer"),
    [(("model", "adapter"), [], False), (("adapter",), [], True), (("model", "adapter"), ["<a>"], True)],
)
def test_an_exported_adapter_has_a_tokenizer_if_it_is_the_only_output_or_adds_tokens(
    tmp_path: Path, base: Path, outputs: tuple[str, ...], new_tokens: list[str], with_tokenizer: bool
) -> None:
    job = job_with(tmp_path, base, *outputs, method="lora", new_tokens=new_tokens)
    LoopEngine().collect(job, tmp_path / "out")
    adapter = tmp_path / "out" / "adapter"
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(outputs)
    assert (adapter / "tokenizer.json").is_file() == with_tokenizer
    written = json.loads((adapter / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == job.base_model
