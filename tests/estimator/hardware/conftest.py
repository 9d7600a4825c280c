"""No hardware tables, prices or accounts but the tests' own, whoever runs them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from estimator import hardware
from tests.estimator.hardware.price_servers import CLOSED, PriceList
from tests.http_server import serving


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "my-hardware.csv"


@pytest.fixture(autouse=True)
def _isolated_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials, settings, cache or files of whoever runs the tests."""
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "FINETUNE_HARDWARE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", CLOSED)
    hardware.clear_cache()


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")


@pytest.fixture
def aws(credentials: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """EC2 by moto, which has AWS's own answers on machine types; the price list by the server above."""
    from moto.server import ThreadedMotoServer

    PriceList.asked.clear()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL_EC2", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    with serving(PriceList) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", url)
        yield
    server.stop()
