"""The finetune command: what it loads, and how it answers mistakes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from estimator.cli import app as program
from estimator.cli.app import COMMANDS, app, load
from estimator.errors import CannotFit, UserError
from tests.decorators.flows.plans import make_plan

HEAVY = ("torch", "metaflow", "transformers", "boto3", "kubernetes", "numpy", "altair", "psutil", "pynvml")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words, prog_name="finetune")


def modules_after(*words: str) -> set[str]:
    """What a process has imported when the command has ended."""
    code = (
        "import sys\n"
        "from estimator.cli.app import app\n"
        "try:\n"
        f"    app({list(words)!r}, prog_name='finetune')\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
        "print('modules:', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("modules:")[2].split())


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("doctor", "--help"),
        ("plan", "--model", "tiny-llama", "--gpu", "L4"),
        ("estimate", "--model", "llama-8b", "--over", "tp", "--gpus", "8"),
        ("gpus", "--min-vram", "100"),
    ],
    ids=" ".join,
)
def test_no_command_imports_modules_that_it_does_not_need(words: tuple[str, ...]) -> None:
    loaded = modules_after(*words)
    assert [name for name in HEAVY if name in loaded] == []
    others = {f"estimator.cli.{name}" for name in COMMANDS if name != words[0]}
    assert others & loaded == set()


@pytest.mark.parametrize("name", ["estimate", "plan"])
def test_every_option_has_a_help_text(name: str) -> None:
    silent = [option.name for option in load(name).params if not getattr(option, "help", "")]
    assert silent == []


def test_finetune_help_lists_every_command_and_version_prints_the_package_version() -> None:
    shown = run("--help").output
    assert all(name in shown for name in COMMANDS)
    assert run("--version").output.startswith("finetune 0.")


@pytest.mark.parametrize("words", [("plans",), ("estimate",), ("estimate", "--modell", "x"), ("gpus", "--x")])
def test_an_unknown_command_ends_with_status_2(words: tuple[str, ...]) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("models", "--family"), "Option '--family' requires an argument."),
        (("gpus", "--min-vram", "x"), "Invalid value for '--min-vram': 'x' is not a number."),
        (("models", "llama", "qwen"), "Unexpected argument: qwen"),
    ],
)
def test_an_invalid_command_line_is_answered_in_two_lines(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.exit_code == 2
    assert done.output.splitlines() == [message, f"Run finetune {words[0]} --help for the options."]


@pytest.mark.parametrize("level", [("--log-level", "warning"), ("--log-level=warning",)])
def test_the_log_level_may_come_before_a_command_and_after_it(level: tuple[str, ...]) -> None:
    shown = run("gpus", "--min-vram", "100").output
    assert run(*level, "gpus", "--min-vram", "100").output == shown
    assert run("gpus", *level, "--min-vram", "100").output == shown
    assert run("gpus", "--log-level").exit_code == run("gpus", "--", *level).exit_code == 2


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Makes `finetune models` raise what the test puts into the list."""
    errors: list[BaseException] = []

    def models() -> None:
        """Raise it."""
        raise errors[0]

    class Module:
        pass

    Module.models = staticmethod(models)  # type: ignore[attr-defined]
    monkeypatch.setattr(program.importlib, "import_module", lambda _: Module)
    return errors


def test_a_user_error_prints_two_lines_and_exits_with_2(failing: list[BaseException]) -> None:
    failing.append(UserError("--gpus 0 must be a whole number above 0.", "Ask for 1 or more."))
    done = run("models")
    assert done.exit_code == 2
    assert done.stderr == "--gpus 0 must be a whole number above 0.\nAsk for 1 or more.\n"
    assert done.stdout == ""


def test_a_missing_or_invalid_option_prints_two_lines() -> None:
    missing, invalid = run("plan"), run("gpus", "--min-vram", "abc")
    for done, option, command in ((missing, "'--model'", "plan"), (invalid, "'--min-vram': 'abc'", "gpus")):
        assert done.exit_code == 2
        what, remedy = done.stderr.splitlines()
        assert option in what
        assert remedy == f"Run finetune {command} --help for the options."


def test_a_job_that_does_not_fit_exits_with_1_and_suggests_a_command_that_fits(
    failing: list[BaseException],
) -> None:
    failing.append(
        CannotFit(
            "llama-70b does not fit.",
            suggestions=({"resources.gpus": 8}, {"with": "batch"}),
            available="1x L4",
        )
    )
    done = run("models")
    assert done.exit_code == 1
    assert "llama-70b does not fit." in done.stderr
    assert "finetune models --gpus 8" in done.stderr
    assert "finetune models --no-here" in done.stderr


def test_an_interrupt_prints_nothing(failing: list[BaseException]) -> None:
    failing.append(KeyboardInterrupt())
    done = run("models")
    assert (done.exit_code, done.output.strip()) == (130, "")


@pytest.mark.parametrize(
    "words",
    [
        "estimator.cli.app --help",
        "estimator.cli.app --version",
        "estimator.cli.app gpus",
        "estimator.cli.app gpus --csv",
        "estimator.cli.app models",
        "estimator.cli.app models --json",
        "estimator.cli.app settings",
        "estimator.cli.app plan --help",
        "estimator.cli.app plan --model tiny-llama --gpu L4 --verbose",
        "estimator.cli.app estimate --model tiny-llama",
        "estimator.cli.app check --help",
        "launchers --help",
        "checklist --help",
    ],
)
def test_a_closed_pipe_on_standard_output_ends_a_command_like_sigpipe(words: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        command = [sys.executable, "-m", *words.split()]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True)
    assert done.returncode in (-signal.SIGPIPE, 128 + signal.SIGPIPE)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("plan", "--model", "tiny-llama", "--gpu", "L4"), ("gpus",)])
def test_output_to_a_full_disk_ends_in_two_lines(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "estimator.cli.app", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "No space left on device, for the output or a file." in done.stderr
    assert done.stderr.rstrip().endswith("Free space there, then run again.")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error(closed: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m estimator.cli.app models llama-8b {closed}; echo status $?"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("status 0\n")
    assert done.stderr == ""


def test_an_unexpected_exception_is_not_hidden(failing: list[BaseException]) -> None:
    failing.append(ZeroDivisionError("a bug"))
    assert isinstance(run("models").exception, ZeroDivisionError)


def test_the_example_plan_of_a_cannot_fit_error_is_printed(failing: list[BaseException]) -> None:
    plan_of_job = make_plan({"model": "llama-8b"}, "kubernetes")
    failing.append(CannotFit("It does not fit here.", example_plan=plan_of_job))
    assert "A100-80GB" in run("models").stderr


def test_a_path_that_the_system_cannot_resolve_is_refused_in_two_lines(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in ("./" + "x" * 300, str(tmp_path / "loop" / "model")):
        done = run("plan", "--model", path)
        assert done.exit_code == 2
        assert len(done.stderr.splitlines()) == 2
        assert "Traceback" not in done.output
