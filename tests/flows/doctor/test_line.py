"""Text that is removed from a line of the report."""

from __future__ import annotations

import pytest

from flows.doctor.line import Line, without_secrets

ENVIRONMENT = {
    "HF_TOKEN": "hf_abc",
    "WANDB_API_KEY": "hf_abcdef",
    "AWS_SECRET_ACCESS_KEY": "x/y+z",
    "HOME": "/h",
}


@pytest.mark.parametrize("secret", ["hf_abc", "hf_abcdef", "x/y+z", "user:pass"])
def test_secrets_of_the_environment_and_of_addresses_are_removed_from_a_line(
    secret: str,
) -> None:
    text = "hf_abcdef, hf_abc and x/y+z at https://user:pass@host/path in /h"
    shown = without_secrets(Line(check="c", state="no", found=text, fix=text), ENVIRONMENT)
    assert secret not in shown.found + shown.fix
    assert shown.found == shown.fix == "***, *** and *** at https://***@host/path in /h"


def test_line_breaks_are_replaced_by_spaces() -> None:
    assert without_secrets(Line(check="c", state="no", found="one\n  two"), {}).found == "one two"
