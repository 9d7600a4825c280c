"""A model is pushed to the Hub completely, and obstacles are reported before the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from estimator.errors import UserError
from launchers.results import hub_push
from launchers.settings import Settings, build
from tests.lab import hub as lab
from tests.lab.hub import TOKEN, USER, Hub

PAGE = "# page of the model\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with lab.running() as server:
        lab.use(server, monkeypatch)
        monkeypatch.setattr(hub_push, "PAUSES_S", (0.01,))
        yield server


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The export of a run with adapters."""
    for name, text in {
        "model/model.safetensors": "weights",
        "model/config.json": "{}",
        "model/README.md": "for this machine",
        "adapter/adapter_model.safetensors": "adapter",
        "settings.yaml": "dataset: /home/me/secret.jsonl",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def settings(**export: Any) -> Settings:
    return build({"export": {"push": f"{USER}/mine"} | export})


def test_a_push_creates_a_private_repository_and_a_second_push_changes_nothing(
    hub: Hub, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub_push.check(settings(), must_reach=True)
    assert hub_push.push(finished, PAGE, settings()) == f"{hub.url}/{USER}/mine"
    assert hub.repos == {f"{USER}/mine": True}
    assert hub.files[f"{USER}/mine"] == {
        "README.md": PAGE.encode(),
        "config.json": b"{}",
        "model.safetensors": b"weights",
        "adapter/adapter_model.safetensors": b"adapter",
    }
    hub_push.push(finished, PAGE, settings(visibility="public"))
    assert (hub.repos, hub.uploads) == ({f"{USER}/mine": True}, 2)
    assert TOKEN not in capsys.readouterr().out


def test_a_push_that_failed_half_way_resumes_with_the_missing_files(
    hub: Hub, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http.time, "sleep", lambda _: None)  # the client's own pauses
    hub.lost = 100
    with pytest.raises(UserError, match="HTTP 503") as error:
        hub_push.push(finished, PAGE, settings())
    assert TOKEN not in str(error.value)
    assert (hub.uploads, hub.commits) == (2, [])
    hub.lost = 0
    hub_push.push(finished, PAGE, settings())
    assert (hub.uploads, len(hub.commits)) == (2, 1)
    assert hub.files[f"{USER}/mine"]["model.safetensors"] == b"weights"


def test_an_adapter_without_a_model_is_pushed_to_the_root_of_the_repository(hub: Hub, finished: Path) -> None:
    for path in (finished / "model").iterdir():
        path.unlink()
    (finished / "model").rmdir()
    hub_push.push(finished, PAGE, settings())
    assert set(hub.files[f"{USER}/mine"]) == {"README.md", "adapter_model.safetensors"}


FINE_GRAINED = {"role": "fineGrained", "fineGrained": {"scoped": []}}


@pytest.mark.parametrize(
    ("token", "account", "repo", "expected"),
    [
        (None, {}, "tester/mine", "no token is set"),
        ("hf_wrong", {}, "tester/mine", "rejects this token"),
        (TOKEN, {}, "other/mine", "not a member of other"),
        (TOKEN, {"auth": {"accessToken": {"role": "read"}}}, "tester/mine", "may not write to tester"),
        (TOKEN, {"auth": {"accessToken": FINE_GRAINED}}, "tester/mine", "may not write to tester"),
        (TOKEN, {"orgs": [{"name": "org", "roleInOrg": "read"}]}, "org/mine", "only read access to org"),
    ],
)
def test_obstacles_to_a_push_are_reported_before_the_run(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    account: dict[str, Any],
    repo: str,
    expected: str,
) -> None:
    lab.use(hub, monkeypatch, token)
    hub.account |= account
    with pytest.raises(UserError, match=expected) as error:
        hub_push.check(settings(push=repo), must_reach=True)
    assert len(str(error.value).splitlines()) == 2
    assert "hf_" not in str(error.value).replace("hf_hub", "")


def test_a_machine_without_the_hub_package_may_launch_but_not_push(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.shutdown()
    hub.server_close()
    hub_push.check(settings(), must_reach=False)
    with pytest.raises(UserError, match="cannot be reached"):
        hub_push.check(settings(), must_reach=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        hub_push.check(settings(), must_reach=True)


@pytest.mark.parametrize("name", ["mine", "a/b/c", "-a/b", "a/b--c", "a/b.git", "a/ b", f"a/{'b' * 96}", ""])
def test_an_invalid_repository_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"export\.push"):
        settings(push=name)
