"""Files that the launch stores for remote tasks."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from decorators.storage import MetaflowStorage
from estimator import models
from flows.finetune import artifacts
from launchers import run_config, settings
from launchers.run import preparation
from launchers.store.bundles import MANIFEST, Manifest, get_bundle, put_bundle


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MetaflowStorage:
    implementation = SimpleNamespace(TYPE="local", datastore_root=str(tmp_path / "store"))
    artifact_store = MetaflowStorage(implementation, "finetune-cache")
    monkeypatch.setattr(artifacts, "datastore", lambda **_: artifact_store)
    monkeypatch.setenv(artifacts.STAGED_VARIABLE, "")  # which monkeypatch takes away at the end
    return artifact_store


def test_every_local_dataset_of_a_run_is_passed_to_its_tasks(tmp_path: Path, dataset: Path) -> None:
    second_file, held_out = tmp_path / "more.jsonl", tmp_path / "held-out.jsonl"
    for path in (second_file, held_out):
        path.write_text(f'{{"text": "{path.stem}"}}\n')
    chosen = settings.build(
        {
            "dataset": str(dataset),
            "mixture": {str(second_file): 2, "owner/rows": 1},
            "evaluation": {"dataset": str(held_out)},
        }
    )
    model = models.resolve("tiny-llama", online=False)
    _, staged = artifacts.stage(chosen, model)
    assert list(staged) == [str(dataset), str(second_file), str(held_out)]
    artifacts.carry(model, staged)
    for path in (dataset, second_file, held_out):
        path.unlink()
    local = chosen.model_copy(update={"mixture": {str(second_file): 2.0}})
    samples, train = preparation.read_data(local, tmp_path / "work", fetch=artifacts.fetch_dataset)
    assert [row.source for row in samples] == [0] * 60 + [1]
    assert len(train) == 1


def test_an_export_that_a_signal_ends_leaves_no_half_written_model(
    tmp_path: Path, store: MetaflowStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = tmp_path / "finished"
    finished.mkdir()
    (finished / "model.safetensors").write_text("weights")
    put_bundle(store, "model", finished)
    monkeypatch.setattr(
        artifacts.model_card, "write_records", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
    )
    output = tmp_path / "finetuned"
    inputs: Any = {"plan": None, "settings": SimpleNamespace(output_dir=str(output)), "model": None}
    with pytest.raises(SystemExit):
        artifacts.export(storage=store, output="model", run="7", facts=(), **inputs)
    assert list(output.iterdir()) == []


def test_a_saved_split_is_passed_to_tasks_and_validated_rows_to_later_steps(
    tmp_path: Path, store: MetaflowStorage
) -> None:
    saved = tmp_path / "saved"
    splits = {name: datasets.Dataset.from_list([{"text": name}] * 3) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(saved)
    chosen = settings.build({"dataset": str(saved), "evaluation": {"dataset": f"{saved}#test"}})
    model = models.resolve("tiny-llama", online=False)
    _, staged = artifacts.stage(chosen, model)
    artifacts.carry(model, staged)
    shutil.rmtree(saved)
    fetch = artifacts.fetch_dataset
    read = preparation.read_data(chosen, tmp_path / "work", fetch=fetch)
    key = artifacts.store_rows(store, read, tmp_path / "work" / "rows")
    get_bundle(store, key, tmp_path / "later")
    train, held_out = preparation.open_stored_rows(tmp_path / "later")
    assert [row.text for row in train] == ["train"] * 3  # type: ignore[union-attr]
    assert [row.text for row in held_out or ()] == ["test"] * 3  # type: ignore[union-attr]


def test_images_named_in_a_dataset_file_are_passed_to_tasks(tmp_path: Path, store: MetaflowStorage) -> None:
    image = pytest.importorskip("PIL.Image")
    mine = tmp_path / "mine"
    (mine / "deep").mkdir(parents=True)
    for name in ("one.png", "deep/two.png", "not-named.png"):
        image.new("RGB", (64, 64), name[0].encode()[0]).save(mine / name)
    rows = [{"image": "one.png", "text": "a one"}, {"image": "deep/two.png", "text": "a two"}]
    (mine / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = settings.build({"model": "tiny-sdxl", "dataset": str(mine / "rows.jsonl")})
    model = models.resolve("tiny-sdxl", online=False)
    chosen = run_config.apply_defaults(chosen, model.spec)
    _, staged = artifacts.stage(chosen, model)
    artifacts.carry(model, staged)
    shutil.rmtree(mine)
    dataset_rows, _ = preparation.read_data(chosen, tmp_path / "work", fetch=artifacts.fetch_dataset)
    assert [row.caption for row in dataset_rows] == ["a one", "a two"]  # type: ignore[union-attr]
    (bundle,) = staged.values()
    names = {file.name for file in Manifest.from_json(store.get_bytes(f"{bundle}/{MANIFEST}")).files}
    assert names == {"rows.jsonl", "one.png", "deep/two.png"}
