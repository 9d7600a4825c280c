from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from checklist.checks.gpu import xids_judge
from decorators.backends import tables
from estimator import models
from estimator.data import load_rows, parse_row
from estimator.hardware.cluster.tables import SpotLabel
from estimator.memory import implementations
from estimator.models.shape import ModelShape
from estimator.planning import learning_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    name: str
    count: int
    rate: float | None = 0.5
    exact: bool = False


def test_cells_have_the_types_of_the_fields_and_blank_ones_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "measured.csv"
    file.write_text("name,count,rate,exact,date\nNähe,3,,1,2026-01-01\nb,4,2.5,0,\n", encoding="utf-8")
    first, second = (Measured(**parse_row(Measured, row)) for row in load_rows(file))
    assert first == Measured(name="Nähe", count=3, rate=0.5, exact=True)
    assert second == Measured(name="b", count=4, rate=2.5, exact=False)


@pytest.mark.parametrize(
    ("table", "kind", "other"),
    [
        (models.TABLE, ModelShape, {"aliases"}),
        (implementations.TABLE, implementations.Implementation, set()),
        (learning_rate.TABLE, learning_rate.Reference, set()),
        (tables.DATA / "releases.csv", tables.Release, {"date"}),
        (models.TABLE.with_name("spot_labels.csv"), SpotLabel, {"date"}),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_every_column_is_read(table: Path, kind: type, other: set[str]) -> None:
    assert set(load_rows(table)[0]) - {field.name for field in dataclasses.fields(kind)} == other


def test_every_xid_has_a_known_action() -> None:
    assert {xid.action for xid in xids_judge.table().values()} == set(xids_judge.ACTIONS)
