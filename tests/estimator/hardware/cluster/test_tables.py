"""The tables of labels, taints and reserves are right in themselves, and so is what follows."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import pytest

from estimator import hardware
from estimator.hardware.cluster import tables
from estimator.plan import GIB


@pytest.mark.parametrize("table", ["gpu_labels", "taints", "passing_taints", "reserves"])
def test_every_row_has_its_source_and_a_date(table: str) -> None:
    with (tables.DATA / f"{table}.csv").open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert rows
    for row in rows:
        assert None not in row, row  # a comma too many
        assert row["source"], row
        assert re.fullmatch(r"20\d\d-\d\d", row["date"]), row


def test_every_label_names_a_gpu_of_the_table() -> None:
    for row in tables.gpu_labels():
        assert hardware.gpu(row.gpu).name == row.gpu
        for name, value in row.labels:
            assert re.fullmatch(r"[a-z0-9.-]+/[a-z-.]+", name)
            assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)


def test_each_label_value_identifies_one_gpu() -> None:
    seen = [row.labels for row in tables.gpu_labels()]
    assert len(seen) == len(set(seen))


def test_the_labels_of_a_row_identify_its_gpu_on_a_node() -> None:
    """The estimator reads the same labels from nodes; both ways must agree."""
    for row in tables.gpu_labels():
        value = dict(row.labels)
        if row.scheme in ("gfd", "gke"):
            assert hardware.current().find_gpu(next(iter(value.values()))) == hardware.gpu(row.gpu)
        elif row.scheme in ("coreweave", "oke"):
            ((label, name),) = value.items()
            assert tables.gpu_of_label(label, name) == row.gpu
        else:
            name, mib = value.values()
            assert hardware.current().find_gpu_of_size(name, int(mib)) == hardware.gpu(row.gpu)


def test_a_small_machine_leaves_pods_less_than_nine_tenths() -> None:
    room = tables.pod_resources_on(hardware.instance("g5.xlarge"))
    # 16 GiB - 7.5 % = 14.8; kubelet 1 + 0.8 + 0.68 + 0.1, daemons 0.4. 4 cores - 0.08 - 0.4
    assert room.memory_bytes / GIB == pytest.approx(14.8 - 1 - 0.8 - 0.68 - 0.1 - 0.4)
    assert room.cpu == pytest.approx(4 - 0.06 - 0.01 - 0.01 - 0.4)


def test_pod_resources_are_unknown_for_a_machine_of_unknown_size() -> None:
    unknown = replace(hardware.instance("g2-standard-4"), ram_bytes=None)
    assert tables.pod_resources_on(unknown) is None


def test_pod_resources_are_positive_and_below_the_machine_size() -> None:
    for item in hardware.instances():
        room = tables.pod_resources_on(item)
        if room is not None:
            assert 0.5 * item.vcpu < room.cpu < item.vcpu
            assert 0.5 * item.ram_bytes < room.memory_bytes < item.ram_bytes
