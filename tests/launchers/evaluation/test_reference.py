"""Reference log-probabilities of pairs: computed in parts, by several nodes, and only once."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from estimator.errors import UserError
from launchers.cluster.endpoint import NodeAddress, Secret
from launchers.dataset.batches import collate_pairs
from launchers.dataset.prepared import Prepared
from launchers.engines.loop.tasks import answers_of
from launchers.evaluation import reference
from launchers.gang.failures import RankFailed
from launchers.gang.job import TrainJob
from launchers.models import causal
from launchers.precompute import parts
from launchers.store.bundles import LocalStorage
from tests.launchers.engines import ranks
from tests.launchers.engines.loop import runs

pytestmark = pytest.mark.slow
PAIRS = 2 * reference.PART + 3
BATCH = 32  # pairs that are computed at once to compare with


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """A DPO run whose model and data are read only."""
    folder = tmp_path_factory.mktemp("job")
    model = runs.make_model(folder / "model")
    data = runs.make_data(folder / "data", runs.pairs(PAIRS), batch=4, steps=2)
    return runs.make_job(folder / "work", model, data, steps=2, settings={"task": "dpo"})


@pytest.fixture(scope="module")
def computed(job: TrainJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the reference of that run, read only."""
    folder = tmp_path_factory.mktemp("computed")
    reference.precompute(job, address(), LocalStorage(folder / "store"), folder / "work")
    return folder / "store"


def address(node: int = 0, nodes: int = 1) -> NodeAddress:
    return NodeAddress(
        node=node, nodes=nodes, main_host="127.0.0.1", ports=(1,), secret=Secret("s"), run="test"
    )


def expected(job: TrainJob) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    model = causal.load(job.model_dir, dtype=torch.float32).eval()
    data, logps = Prepared(job.data_dir), []
    for first in range(0, len(data), BATCH):
        batch = collate_pairs([data.row(index) for index in range(first, min(first + BATCH, len(data)))], 0)
        with torch.no_grad():
            answers = answers_of(model(**batch.inputs).logits, batch)
        logps.append(torch.stack([answers.chosen, answers.rejected], dim=1).float().numpy())
    return np.concatenate(logps)


def test_every_pair_gets_reference_log_probabilities_and_a_second_run_computes_nothing(
    tmp_path: Path, job: TrainJob, capsys: pytest.CaptureFixture[str]
) -> None:
    store = LocalStorage(tmp_path / "store")
    file = reference.precompute(job, address(), store, tmp_path / "first")
    assert np.load(file) == pytest.approx(expected(job), abs=1e-4)
    assert "reference: 3 of 3 parts" in capsys.readouterr().out
    second_reference = reference.precompute(job, address(), store, tmp_path / "second")
    assert np.array_equal(np.load(second_reference), np.load(file))
    assert "3 of 3 parts are already stored" in capsys.readouterr().out
    assert not (second_reference.parent / "request-0.json").exists(), "no process was started"


@pytest.mark.nightly
def test_a_different_model_or_dataset_has_its_own_reference_in_the_same_work_folder(
    tmp_path: Path, job: TrainJob, computed: Path
) -> None:
    store, work = LocalStorage(shutil.copytree(computed, tmp_path / "store")), tmp_path / "work"
    first = np.load(reference.precompute(job, address(), store, work))
    data = runs.make_data(tmp_path / "others", runs.pairs(PAIRS, seed=9), batch=4, steps=2)
    model = runs.make_model(tmp_path / "other", "tied")
    for other in (dataclasses.replace(job, model_dir=model), dataclasses.replace(job, data_dir=data)):
        assert not np.allclose(first, np.load(reference.precompute(other, address(), store, work)))


def test_two_nodes_divide_the_parts_and_both_get_all_of_them(tmp_path: Path, job: TrainJob) -> None:
    store = LocalStorage(tmp_path / "store")
    files: dict[int, Path] = {}

    def run(node: int) -> None:
        files[node] = reference.precompute(job, address(node, 2), store, tmp_path / f"node-{node}")

    threads = [threading.Thread(target=run, args=(node,)) for node in (0, 1)]
    with ranks.forked_processes():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert np.array_equal(np.load(files[0]), np.load(files[1]))
    requests = [(files[node].parent / "request-0.json").read_text() for node in (0, 1)]
    assert '"parts": [0, 2]' in requests[0]
    assert '"parts": [1]' in requests[1]


@pytest.mark.nightly
def test_processes_of_a_node_divide_its_parts(
    tmp_path: Path, job: TrainJob, capsys: pytest.CaptureFixture[str]
) -> None:
    store, work = LocalStorage(tmp_path / "store"), tmp_path / "work"
    work.mkdir()
    request = {
        "model_dir": str(job.model_dir),
        "data_dir": str(job.data_dir),
        "judged": False,
        "device": "cpu",
        "trust_remote_code": False,
    }
    of_all = parts.Parts(
        name="reference",
        module="launchers.evaluation.reference",
        fingerprint="x",
        count=PAIRS,
        size=reference.PART,
        suffix=".npy",
    )
    options = {"on_cpu": True, "limit_s": 300.0, "processes": 2}
    files = parts.compute_all(of_all, request, address(), store, work, **options)
    assert np.concatenate([np.load(file) for file in files]) == pytest.approx(expected(job), abs=1e-4)
    assert "reference: 3 of 3 parts" in capsys.readouterr().out
    shares = [json.loads((work / f"request-{number}.json").read_text())["parts"] for number in (0, 1)]
    assert shares == [[0, 2], [1]]


def test_finished_parts_are_not_computed_again_after_kill_9(
    tmp_path: Path, job: TrainJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStorage(tmp_path / "store")
    monkeypatch.setattr(parts, "_POLL_S", 0.01)
    caught: list[RankFailed] = []

    def run() -> None:
        try:
            reference.precompute(job, address(), store, tmp_path / "first")
        except RankFailed as error:
            caught.append(error)

    running = threading.Thread(target=run)
    running.start()
    deadline = time.monotonic() + 180
    while not store.keys("reference") and time.monotonic() < deadline:
        time.sleep(0.005)
    for child in psutil.Process().children(recursive=True):
        if "launchers.evaluation.reference" in child.cmdline():
            os.kill(child.pid, signal.SIGKILL)
    running.join(300)
    stored_parts = len(store.keys("reference"))
    assert stored_parts >= 1
    with ranks.forked_processes():
        file = reference.precompute(job, address(), store, tmp_path / "second")
    assert np.load(file).shape == (PAIRS, 2)
    if caught:  # it was killed before it had done all
        assert "the reference was ended by SIGKILL (9)" in str(caught[0])
        request = (file.parent / "request-0.json").read_text()
        assert len(json.loads(request)["parts"]) == 3 - stored_parts


def test_an_unreadable_model_is_reported_in_one_line(tmp_path: Path, job: TrainJob) -> None:
    model = shutil.copytree(job.model_dir, tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nothing!")
    job = dataclasses.replace(job, model_dir=model)
    with ranks.forked_processes(), pytest.raises(UserError, match="The reference could not be computed"):
        reference.precompute(job, address(), LocalStorage(tmp_path / "store"), tmp_path / "first")
