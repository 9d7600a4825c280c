"""Tokens are reported as present or missing, never by value."""

from __future__ import annotations

from pathlib import Path

from tests.flows.doctor.conftest import QueryProbe

VALUES = {
    "HF_TOKEN": "hf_value-of-a-token",
    "AWS_ACCESS_KEY_ID": "AKIAVALUE",
    "AWS_SECRET_ACCESS_KEY": "value/of/a/key",
    "WANDB_API_KEY": "value-of-wandb",
}


def test_missing_tokens_are_reported_with_how_to_set_them(query_probe: QueryProbe) -> None:
    lines = query_probe("tokens")
    assert lines.keys() == {"HF_TOKEN", "AWS credentials", "WANDB_API_KEY"}
    assert {line.found for line in lines.values()} == {"not set"}
    assert all(line.fix for line in lines.values())


def test_values_of_tokens_are_not_shown(query_probe: QueryProbe) -> None:
    lines = query_probe("tokens", **VALUES)
    assert {line.state for line in lines.values()} == {"ok"}
    assert [lines[name].found for name in ("HF_TOKEN", "AWS credentials", "WANDB_API_KEY")] == [
        "set",
        "set (env)",
        "set",
    ]


def test_a_wandb_login_is_found(query_probe: QueryProbe, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password value-of-wandb\n")
    (tmp_path / ".netrc").chmod(0o600)
    line = query_probe("tokens")["WANDB_API_KEY"]
    assert line.found == "set (netrc)"
