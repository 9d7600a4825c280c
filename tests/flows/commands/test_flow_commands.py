"""finetune run, check, flow: arguments passed to the packaged flows, from any folder."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from estimator.errors import UserError
from flows.commands import flow_commands
from flows.commands.flow_commands import BEFORE_COMMAND, FLOWS, command_line, console_script, flow_arguments
from tests.flows.conftest import environment

SETTINGS = ["--config", "settings", "mine.yaml"]
FINETUNE = [sys.executable, "-m", "estimator.cli.app"]


def finetune(
    home: Path, *arguments: str, timeout: float = 120, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``finetune`` with these arguments in ``home``, an empty folder."""
    done = subprocess.run(
        [*FINETUNE, *arguments],
        cwd=home,
        env=environment(home, **variables),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "run"),
        ("--model llama-8b --with kubernetes:image=x", "run --model llama-8b --with kubernetes:image=x"),
        ("--lr 1e-5 --config settings a.yaml --seed 3", "--config settings a.yaml run --lr 1e-5 --seed 3"),
        ("--datastore=s3 --quiet --tag a", "--datastore=s3 --quiet run --tag a"),
        ("--help", "run --help"),
        ("--config settings", "--config settings run"),
    ],
)
def test_metaflows_global_options_may_appear_anywhere(arguments: str, expected: str) -> None:
    assert flow_arguments("run", arguments.split()) == ("finetune_flow.py", expected.split())


@pytest.mark.parametrize(
    ("file", "arguments", "expected"),
    [
        ("finetune_flow.py", ["run", "--plan-only"], "finetune run --plan-only"),
        ("finetune_flow.py", ["--quiet", "run", "--seed", "3"], "finetune run --quiet --seed 3"),
        (
            "finetune_flow.py",
            ["--quiet", "--config", "settings", "a.yaml", "run", "--seed", "3"],
            "finetune run a.yaml --quiet --seed 3",
        ),
        ("finetune_flow.py", ["--config", "settings", "a", "run"], "finetune run --config settings a"),
        ("finetune_flow.py", ["resume"], "finetune flow resume"),
        ("finetune_flow.py", ["--quiet", "resume"], "finetune flow --quiet resume"),
        ("finetune_flow.py", [], "finetune flow"),
        ("checklist_flow.py", ["run"], "finetune check"),
        ("checklist_flow.py", ["card", "view", "a b"], "finetune flow checklist card view 'a b'"),
        ("rejection_flow.py", ["run"], "finetune flow rejection run"),
        ("mine.py", ["run"], "python /x/mine.py run"),
    ],
)
def test_a_command_of_a_flow_file_is_shown_as_a_finetune_command(
    file: str, arguments: list[str], expected: str
) -> None:
    assert command_line(f"/x/{file}", arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "file", "expected"),
    [
        ("resume", "finetune_flow.py", "resume"),
        ("rejection run --score f", "rejection_flow.py", "run --score f"),
        ("--datastore s3 linear", "finetune_flow.py", "--datastore s3 linear"),
        ("checklist", "checklist_flow.py", "--help"),
    ],
)
def test_the_first_argument_may_name_the_flow(arguments: str, file: str, expected: str) -> None:
    assert flow_arguments("flow", arguments.split()) == (file, expected.split())


@pytest.mark.parametrize(
    ("command", "arguments", "expected"),
    [
        ("run", "my.yaml --lr 1e-4", "--config settings my.yaml run --lr 1e-4"),
        ("run", "a/b.yml --quiet", "--config settings a/b.yml --quiet run"),
        ("run", "--dataset my.yaml", "run --dataset my.yaml"),
        ("check", "nightly.yaml", "--config options nightly.yaml run"),
    ],
)
def test_a_leading_yaml_file_is_the_settings_file_of_the_run(
    command: str, arguments: str, expected: str
) -> None:
    assert flow_arguments(command, arguments.split()) == (
        FLOWS[flow_commands.RUNS[command]],
        expected.split(),
    )


def test_a_missing_settings_file_is_reported_with_similar_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lora.yaml").touch()
    with pytest.raises(UserError, match=r"There is no file lorra.yaml") as caught:
        flow_commands.check_leading_file(["lorra.yaml", "--lr", "1e-4"])
    assert caught.value.advice == "Did you mean lora.yaml?"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--with", "kuberntes"], "Unknown step decorator kuberntes"),
        (["run", "--max-steps", "x"], "Try 'finetune run --help' for help."),
        (["check", "--nodess", "2"], "Did you mean --nodes?"),
        (["flow", "resume"], "There is no run to resume"),
        (["flow", "rejection", "rum"], "Did you mean run, resume?"),
        (["flow", "lineer", "run"], "Did you mean linear?"),
        (["flow", "xyz"], "`finetune flow --help` lists the commands."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_every_user_error_before_a_run_exits_with_2_and_starts_no_run(
    tmp_path: Path, arguments: list[str], expected: str
) -> None:
    done = finetune(tmp_path, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stdout + done.stderr
    assert "Workflow starting" not in done.stdout


@pytest.mark.slow
def test_the_options_moved_before_the_command_are_the_global_options_of_metaflow(
    tmp_path: Path,
) -> None:
    options = r"--(?:\w|-)+"
    before = set(re.findall(options, finetune(tmp_path, "flow", "--help").stdout))
    after = set(re.findall(options, finetune(tmp_path, "run", "--help").stdout))
    assert before - after - {"--help"} == set(BEFORE_COMMAND)


@pytest.mark.slow
def test_completion_knows_the_commands_and_the_options_of_the_flows(tmp_path: Path) -> None:
    def complete(line: str) -> set[str]:
        completion_environment = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
        return set(
            finetune(tmp_path, _FINETUNE_COMPLETE="complete_bash", **completion_environment).stdout.split()
        )

    assert {"plan", "run", "runs"} & complete("finetune ru") == {"run", "runs"}
    assert complete("finetune run --mo") == {"--mode", "--model", "--modules-to-save", "--monitor"}
    assert complete("finetune check --gpus-per") == {"--gpus-per-node"}
    assert (complete("finetune plan --mode"), complete("finetune flow lin")) == ({"--model"}, {"linear"})


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_can_be_resumed_and_its_card_read_in_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("max_steps: 2\nseq_len: 128\n")
    once = finetune(tmp_path, "run", "--set=evaluation.generations=0", *SETTINGS, timeout=300)
    assert once.returncode == 0, once.stdout + once.stderr
    resumed = finetune(tmp_path, "flow", "resume", "export", timeout=300)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert len(list(tmp_path.glob("finetuned/*/model/model.safetensors"))) == 2
    card = finetune(tmp_path, "flow", "card", "get", "train", "card.html", "--id", "finetune")
    assert (tmp_path / "card.html").stat().st_size > 10_000, card.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_a_checklist_runs_in_an_empty_folder_and_names_its_card(tmp_path: Path) -> None:
    done = finetune(tmp_path, "check", "--nodes", "1", "--only", "gemm", "--device", "cpu", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (task,) = re.findall(r"card: finetune flow checklist card view (\S+) --id checklist", done.stdout)
    card = finetune(tmp_path, *f"flow checklist card get {task} card.html --id checklist".split())
    assert (tmp_path / "card.html").stat().st_size > 10_000, card.stderr


def test_suggested_commands_can_be_found_by_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / ".venv" / "bin" / "finetune"
    script.parent.mkdir(parents=True)
    script.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(script.with_name("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    assert console_script() == ".venv/bin/finetune"
    assert command_line("finetune_flow.py", ["card"], console_script()) == ".venv/bin/finetune flow card"
    monkeypatch.chdir(script.parent.parent)
    assert console_script() == "bin/finetune"
    monkeypatch.chdir("/")
    monkeypatch.setenv("PATH", str(script.parent))
    assert console_script() == "finetune"
    script.unlink()
    monkeypatch.setenv("PATH", "")
    assert console_script() == "finetune"


def test_a_scorer_next_to_the_settings_file_is_found_from_another_folder(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "scorer.py").write_text("def short(prompt, answer):\n    return 1.0\n")
    (tmp_path / "examples" / "grpo.yaml").write_text(
        "{task: grpo, method: lora, model: llama-8b, rl: {reward: 'scorer.py:short'}}\n"
    )
    arguments = ("run", "examples/grpo.yaml", "--with", "kubernetes", "--from-catalogue", "--plan-only")
    done = finetune(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Plan: llama-8b")
