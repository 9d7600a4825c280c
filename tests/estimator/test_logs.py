"""Log messages: their levels, where they go, and that they hold no secrets."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from estimator import logs
from estimator.cli.app import app
from estimator.errors import UserError
from estimator.masking import MASK, mask_file, mask_secrets

SECRET = "correct-horse-battery"


@pytest.fixture(autouse=True)
def configured_by_the_test_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in logs.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # A command sets it for its child processes; monkeypatch restores what was there
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "")
    yield
    logs.reset()


def finetune(*words: str) -> tuple[int, str]:
    """Run the command; returns its exit status and standard error."""
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stderr


def test_without_a_level_a_command_logs_nothing() -> None:
    assert finetune("gpus") == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ("--log-level", "debug", "plan", "--model", "llama-8b"),
        ("plan", "--model", "llama-8b", "--log-level=debug"),
    ],
)
def test_the_planner_names_discarded_candidates_at_level_debug(words: tuple[str, ...]) -> None:
    status, errors = finetune(*words, "--gpu", "A10G", "--method", "full")
    assert status in (0, 1)
    discarded = [line for line in errors.splitlines() if "estimator.planning" in line and "discarded" in line]
    assert any("A10G" in line and "over" in line for line in discarded), (
        "what it is and by how much it misses"
    )


def test_the_environment_sets_the_level_and_the_option_takes_precedence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(logs.LEVEL_VARIABLE, "debug")
    logs.setup()
    assert logging.getLogger("estimator.models").isEnabledFor(logging.DEBUG)
    logs.setup("error")
    assert not logging.getLogger("launchers.gang").isEnabledFor(logging.INFO)
    assert not logging.getLogger("torch_of_somebody").isEnabledFor(logging.DEBUG)


def test_an_unknown_level_is_refused_with_the_levels_that_exist() -> None:
    with pytest.raises(UserError, match="loud") as refused:
        logs.setup("loud")
    assert all(level in refused.value.advice for level in logs.LEVELS)


def test_no_secret_reaches_the_terminal_or_the_log_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    logs.setup("debug")
    file = tmp_path / "logs" / "run.log"
    log = logging.getLogger("launchers.store.bundles")
    with logs.recording(file):
        log.debug("token %s, %r", SECRET, {"Authorization": f"Bearer {SECRET}"})
        log.info("https://alice:%s@host/path", "hunter2")
        log.info("https://bucket.s3.amazonaws.com/key?X-Amz-Signature=%s", "0123456789abcdef")
        try:
            raise ValueError(f"login with {SECRET} failed")
        except ValueError:
            log.exception("not stored")
    written = file.read_text()
    shown = capsys.readouterr().err
    for text in (written, shown):
        assert SECRET not in text
        assert "hunter2" not in text
        assert "0123456789abcdef" not in text
        assert "ValueError" in text
        assert MASK in text
    assert file.stat().st_mode & 0o077 == 0, "for its user alone"


def test_the_log_file_has_debug_messages_that_the_terminal_omits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.log"
    with logs.recording(file):
        logging.getLogger("estimator.models").debug("looked up")
        logging.getLogger("launchers.gang.hub").warning("late")
    logging.getLogger("estimator.models").debug("after it")
    assert "looked up" in file.read_text()
    assert "late" in file.read_text()
    assert "after it" not in file.read_text()
    assert capsys.readouterr().err.splitlines() == ["late"]


def test_a_level_that_is_set_while_a_log_is_recorded_stays_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logs.recording(tmp_path / "run.log"):
        logs.setup("info")
        logging.getLogger("launchers.run.preparation").info("once")
    logging.getLogger("launchers.run.preparation").info("afterwards")
    shown = capsys.readouterr().err
    assert shown.count("once") == shown.count("afterwards") == 1


def test_a_log_file_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with logs.recording(tmp_path / "file" / "run.log"):
        pass


def test_a_user_error_has_a_traceback_only_if_requested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, errors = finetune("estimate", "--model", "no-such-model")
    assert status == 2
    assert "Traceback" not in errors
    monkeypatch.setenv(logs.TRACEBACK_VARIABLE, "1")
    status, errors = finetune("estimate", "--model", "no-such-model")
    assert status == 2
    assert "Traceback" in errors
    assert "estimator/models" in errors


def test_values_of_ordinary_variables_are_not_masked() -> None:
    environment = {"TOKENIZERS_PARALLELISM": "false", "HOME": "/home/alice", "API_KEY": "abc"}
    assert mask_secrets("false /home/alice abc", environment) == "false /home/alice abc"
    assert mask_secrets("key abcd", {"METAFLOW_SERVICE_AUTH_KEY": "abcd"}) == f"key {MASK}"
    assert mask_secrets("key abcd", {"API_KEY": "abcd"}) == f"key {MASK}", "from 4 characters on"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_TOKENS", "4096-tokens"),
        ("TOKEN_BUDGET", "4096"),
        ("TOKEN_SHARE", "0.25"),
        ("TOKEN_BUDGET", "10000000000"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/secrets/token"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/root/key.json"),
        ("METAFLOW_DEFAULT_SECRETS_BACKEND_TYPE", "aws-secrets-manager"),
        ("PWD", "/home/alice"),
    ],
)
def test_numbers_paths_and_counts_of_tokens_are_not_masked(name: str, value: str) -> None:
    assert mask_secrets(f"value {value}", {name: value}) == f"value {value}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN_2", "opaque-token"),
        ("PGPASSWORD", "hunter2"),
        ("SMTP_PASS", "hunter2"),
        ("MYSQL_PWD", "hunter2"),
        ("OPENAI_APIKEY", "opaque-key"),
        ("hub_access_key", "opaque-key"),
        ("TOKEN", "123456789012"),
        ("CHECKLIST_WEBHOOK_URL", "https://example.com/hook"),
    ],
)
def test_values_of_secret_variables_are_masked(name: str, value: str) -> None:
    assert mask_secrets(f"login ({value}) refused", {name: value}) == f"login ({MASK}) refused"


def test_a_short_secret_is_masked_as_a_word_and_a_long_one_anywhere() -> None:
    environment = {"DB_PASSWORD": "test", "API_KEY": "long-key"}
    assert mask_secrets("latest test=test xlong-keyx", environment) == f"latest {MASK}={MASK} x{MASK}x"


def test_secrets_in_a_finished_log_file_are_masked_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    plain, log = tmp_path / "plain.log", tmp_path / "stderr.log"
    lines = b"".join(b"step %d \xff\r\n" % number for number in range(200_000))  # more than one block
    plain.write_bytes(lines)
    log.write_bytes(lines + f"login with {SECRET}\n".encode() + lines)
    before = plain.stat()
    for path in (plain, log):
        mask_file(path)
    assert log.read_bytes() == lines + f"login with {MASK}\n".encode() + lines
    assert (plain.read_bytes(), plain.stat().st_ino) == (lines, before.st_ino)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.log", "stderr.log"]
