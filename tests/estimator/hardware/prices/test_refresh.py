"""``--refresh``: one line for each provider, whatever happens to it; what was learned stays."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from estimator import hardware
from estimator.hardware.prices import cache, refresh
from estimator.hardware.prices.cache import ProviderAnswer
from tests.estimator.hardware.price_servers import CLOSED, Silent, unchanged
from tests.http_server import serving


def test_each_offline_provider_gives_one_line(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", CLOSED)
    lines = refresh.refresh()
    assert "aws: nothing changed; on-demand prices, spot prices, machine types: cannot be reached" in lines
    assert [line.split(":")[0] for line in lines] == ["gpuhunt", "aws"]
    assert unchanged()


def test_missing_libraries_are_named(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    assert refresh.refresh() == (
        "gpuhunt: not queried: it is not installed (pip install gpuhunt)",
        "aws: not queried: boto3 is not installed (pip install 'metaflow-finetune[aws]')",
    )
    assert unchanged()


def test_a_server_that_never_responds_is_abandoned_at_the_time_limit(
    credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gpuhunt", None)
    with serving(Silent) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        start = time.monotonic()
        lines = refresh.refresh(limit_s=2)
        took = time.monotonic() - start
    (reported,) = (line for line in lines if line.startswith("aws: "))
    assert "nothing changed" in reported
    assert "no answer within 2 s" in reported or "time limit reached" in reported  # on a busy machine
    assert took < 5
    assert unchanged()


def test_an_exception_in_one_provider_does_not_affect_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> ProviderAnswer:
        raise KeyError("PriceList")

    cells = {
        "cloud": "gcp",
        "instance_type": "a2-highgpu-1g",
        "on_demand_usd_h": "3",
        "price_date": "2026-11-20",
    }
    fine = ProviderAnswer(line="fine", machines={"a2-highgpu-1g": cells})
    monkeypatch.setattr(refresh, "PROVIDERS", (("one", broken), ("two", lambda *_: fine)))
    assert refresh.refresh() == ("one: failed, nothing changed: KeyError: 'PriceList'", "two: fine")
    assert hardware.instance("a2-highgpu-1g").usd_per_hour == 3


def test_an_unwritable_cache_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"cloud": "gcp", "instance_type": "a2-highgpu-1g", "on_demand_usd_h": "3"}
    answer = ProviderAnswer(line="fine", machines={"a2-highgpu-1g": cells})
    monkeypatch.setattr(refresh, "PROVIDERS", (("two", lambda *_: answer),))
    (tmp_path / "cache").write_text("a file where the folder should be")
    lines = refresh.refresh()
    assert lines[0] == "two: fine"
    assert lines[1].startswith(f"not saved: cannot write {cache.path()}: ")


def test_a_later_refresh_keeps_earlier_prices_of_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, price in (("g5.xlarge", "0.8"), ("g6.xlarge", "0.7")):
        cells = {"cloud": "aws", "instance_type": name, "on_demand_usd_h": price, "price_date": "2026-11-20"}
        answer = ProviderAnswer(line="fine", machines={name: cells})
        monkeypatch.setattr(refresh, "PROVIDERS", (("two", lambda *_, answer=answer: answer),))
        refresh.refresh()
    assert [hardware.instance(name).usd_per_hour for name in ("g5.xlarge", "g6.xlarge")] == [0.8, 0.7]
    assert [file.name for file in cache.path().parent.iterdir()] == ["prices.csv"]
