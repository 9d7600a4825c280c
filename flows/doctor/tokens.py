"""Presence of tokens. Their values are not shown."""

from __future__ import annotations

import netrc
import os
from importlib.util import find_spec

from estimator.remote import hub_token
from flows.doctor.line import Line

_WANDB_HOST = "api.wandb.ai"  # host name under which `wandb login` stores its key


def tokens() -> list[Line]:
    """Return one line per token: set, with its source, or not set."""
    return [
        _line("HF_TOKEN", "set" if hub_token() else "", "Set HF_TOKEN to use gated and private models"),
        _line("AWS credentials", _aws(), "Run aws configure or aws sso login to use S3 and AWS Batch"),
        _line("WANDB_API_KEY", _wandb(), "Run wandb login or set WANDB_API_KEY to use --tracker wandb"),
    ]


def _line(name: str, found: str, fix: str) -> Line:
    return Line(check=name, state="ok", found=found) if found else _absent(name, fix)


def _absent(name: str, fix: str) -> Line:
    return Line(check=name, state="no", found="not set", fix=fix)


def _aws() -> str:
    """Return where boto3 finds credentials, by boto3's name; without boto3 only the environment counts."""
    if find_spec("boto3") is None:
        names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        return "set (env)" if all(os.environ.get(name) for name in names) else ""
    import boto3

    credentials = boto3.Session().get_credentials()
    return "" if credentials is None else f"set ({credentials.method})"


def _wandb() -> str:
    if os.environ.get("WANDB_API_KEY"):
        return "set"
    try:
        return "set (netrc)" if netrc.netrc().authenticators(_WANDB_HOST) else ""
    except (OSError, netrc.NetrcParseError):
        return ""
