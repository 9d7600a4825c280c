"""Several ranks with NCCL on one GPU: commands, results, and a rehearsal with gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.on_gpu import shared
from benchmarks.on_gpu.shared import Row
from estimator.errors import UserError


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["shared", *arguments])
    shared.main()


def test_ranks_on_namespaces_are_separate_hosts_to_nccl_and_share_the_gpu(tmp_path: Path) -> None:
    library = tmp_path / "libnccl.so.2"
    ranks = [shared.environment("cuda", library, rank, hosts=True) for rank in (0, 1)]
    assert [values["NCCL_HOSTID"] for values in ranks] == ["h0", "h1"]
    for values in ranks:
        assert (values["CUDA_VISIBLE_DEVICES"], values["NCCL_MULTI_RANK_GPU_ENABLE"]) == ("0", "1")
        assert values["LD_PRELOAD"] == str(library)
    assert "NCCL_HOSTID" not in shared.environment("cuda", None, 0, hosts=False)
    assert shared.environment("cpu", library, 0, hosts=True) == {"CUDA_VISIBLE_DEVICES": ""}


def test_a_dry_run_prints_a_command_for_each_part_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_main(monkeypatch, "--dry-run", "--out", str(tmp_path))
    text = capsys.readouterr().out
    assert text.count(" -m checklist ") + text.count(" -m launchers ") == len(shared.parts())
    assert not list(tmp_path.iterdir())


def test_losses_of_two_ranks_are_compared_with_those_of_one() -> None:
    def rows(second: float) -> dict[str, Row]:
        values = {"train fsdp2 on 1": [2.0, 1.0], "train fsdp2 on 2": [2.0, second]}
        return {name: Row(part=name, expected="", losses=losses) for name, losses in values.items()}

    (equal,) = shared.compared(rows(1.0), "cpu")
    (different,) = shared.compared(rows(1.1), "cuda")
    assert "equal" in equal
    assert "DIFFERENT" in different
    assert not shared.compared({}, "cpu")


def test_unknown_words_are_an_error() -> None:
    with pytest.raises(UserError, match="no part has all these words"):
        shared.chosen("banana")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_rehearsal_on_the_cpu_keeps_finished_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        run_main(
            monkeypatch, "--device", "cpu", "--only", "train fsdp2", "--minutes", "20", "--out", str(tmp_path)
        )
    text = capsys.readouterr().out
    rows = {row["part"]: row for row in json.loads((tmp_path / "shared_gpu_cpu.json").read_text())["rows"]}
    assert [rows[f"train fsdp2 on {ranks}"]["statuses"] for ranks in (1, 2)] == [[0], [0, 0]]
    assert text.count("train fsdp2 on 2:") == 1
    assert "losses of 2 ranks and of 1 are equal" in text
