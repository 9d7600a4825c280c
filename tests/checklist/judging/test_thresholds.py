"""Thresholds apply only to their key; a file of the user overrides them, and its errors are named by cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from checklist.analysis.busbw import OPS
from checklist.judging.thresholds import PAIR, SHIPPED, Key, Threshold, read, table
from estimator import hardware
from estimator.errors import UserError

GIB = 2**30
HEADER = "system,op,min_bytes,gpus,nodes,floor,warn,source\n"


def key(
    system: str, op: str = "all_reduce", size: int | None = 16 * GIB, gpus: int = 8, nodes: int = 1
) -> Key:
    return Key(systems=(system,), op=op, bytes=size, gpus=gpus, nodes=nodes)


def test_every_shipped_row_has_a_source_and_a_kind() -> None:
    rows = read(SHIPPED)
    assert len(rows) >= 30
    for row in rows:
        assert row.source
        assert row.kind in ("published", "proposal")
        assert row.measured is None or row.floor <= row.measured, row


def test_every_shipped_system_is_a_gpu_or_machine_type_of_the_catalog() -> None:
    known_systems = {gpu.name for gpu in hardware.gpus()} | {machine.name for machine in hardware.instances()}
    assert {row.system for row in read(SHIPPED)} <= known_systems


def test_bandwidths_between_gpus_have_an_expectation_and_no_threshold_row() -> None:
    assert not {row.op for row in read(SHIPPED)} & {*OPS, PAIR}


def test_no_two_shipped_rows_have_the_same_key() -> None:
    rows_by_key: dict[tuple[object, ...], list[Threshold]] = {}
    for row in read(SHIPPED):
        same = (row.system, row.op, row.algorithm, row.gpus, row.nodes)
        for other in rows_by_key.get(same, ()):
            first, second = sorted((row.sizes, other.sizes), key=lambda span: span.low)
            assert first.high < second.low, (row, other)
        rows_by_key.setdefault(same, []).append(row)


@pytest.mark.parametrize(
    ("key_wanted", "floor"),
    [
        (key("A100 SXM 80GB", op="gemm_bf16", size=None, nodes=7), 249.3),
        (key("H100 SXM", op="peer_copy", size=None), 335),
        (key("H100 NVL", op="peer_copy", size=None, gpus=2), 256),
    ],
)
def test_the_row_that_matches_the_key_is_found(key_wanted: Key, floor: float) -> None:
    row = table().find(key_wanted)
    assert row.floor == floor


@pytest.mark.parametrize(
    "key_wanted",
    [
        key("H100 NVL", op="peer_copy", size=None, gpus=4),
        key("H100 SXM", op="gemm_fp32", size=None),
        key("RTX 4090", op="gemm_bf16", size=None),
    ],
    ids=["more GPUs", "another operation", "another GPU"],
)
def test_a_key_without_a_row_has_no_threshold(key_wanted: Key) -> None:
    assert table().find(key_wanted) is None


def test_a_row_of_the_user_overrides_the_shipped_one_and_keeps_all_others(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(HEADER + "h100 sxm,all_reduce,,8,1,300,,our acceptance test\n")
    row = table(file).find(key("H100 SXM"))
    assert (row.floor, row.own) == (300, True)
    assert row.origin == "our acceptance test, your file"
    other = table(file).find(key("B200 SXM", op="gemm_bf16", size=None))
    assert not other.own


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HEADER + "x,all_reduce,,8,1,fast,,me\n", "line 2, column floor: 'fast' is not a number."),
        (HEADER + "x,all_reduce,,8,1,nan,,me\n", "line 2, column floor: 'nan' is not a number from 0 up."),
        (HEADER + "x,all_reduce,,8,1,,,me\n", "line 2, column floor: '' is missing."),
        (HEADER + "x,all_reduce,,8,1,9,8,me\n", "line 2, column warn: '8' is below the floor 9."),
        (HEADER + "x,all_redcue,,8,1,9,,me\n", "line 2, column op: 'all_redcue' is not known."),
        (HEADER + "x,all_reduce,,8,4-2,9,,me\n", "line 2, column nodes: '4-2' ends before it begins."),
        (HEADER + "x,all_reduce,,8,1,9,,me,too\n", "line 2: there are more values than columns."),
        ("system,op,flor,source\n", "line 1, column 'flor': there is no such column."),
        ("system,op,source\n", "line 1: the column floor is missing."),
    ],
)
def test_an_invalid_threshold_is_named_by_line_column_and_value(
    tmp_path: Path, text: str, expected: str
) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises(UserError) as error:
        table(file)
    assert error.value.problem == f"{file}, {expected}"
    assert error.value.advice
    assert "\n" not in error.value.problem


def test_a_missing_or_binary_threshold_file_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        table(tmp_path / "missing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(UserError, match="is not a CSV file"):
        table(tmp_path / "binary.csv")
