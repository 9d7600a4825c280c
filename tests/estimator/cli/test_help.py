"""Help pages and suggestions: short enough for a screen, the same options and defaults in every command."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from estimator.cli.app import COMMANDS, EXTERNAL_COMMANDS, app, load
from estimator.cli.common import COMMON
from estimator.cli.help import HELP_ALL
from launchers.settings import choices_of, default_of, dotted_names

SETTINGS = {name.rpartition(".")[2]: name for name in dotted_names()} | {
    "lora_rank": "lora.rank",
    "optimizer": "optimizer.name",
    "lora_alpha": "lora.alpha",
}
OF_THE_ENGINE = {"lora_rank", "quantization", "precision"}  # estimate: left open, as the engine does


def run(*words: str) -> str:
    return CliRunner().invoke(app, words, prog_name="finetune").output


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if EXTERNAL_COMMANDS.get(name) != "flows.commands.flow_commands"]
)
def test_a_help_page_fits_a_screen(command: str) -> None:
    lines = run(command, "--help").splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert f"finetune {command}" in " ".join(lines)


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_help_all_shows_every_option(command: str) -> None:
    shown, short = run(command, HELP_ALL), run(command, "--help")
    names = [option.opts[0] for option in load(command).params if option.opts != [HELP_ALL]]
    assert [name for name in names if name not in shown] == []
    assert len([name for name in names if name not in short]) > 20
    assert f"Example: finetune {command}" in short


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_shared_options_have_the_defaults_of_a_run(command: str) -> None:
    differing = {}
    for option in load(command).params:
        setting = SETTINGS.get(str(option.name))
        if option.name not in COMMON or setting is None or option.name in ("model", "micro_batch_size"):
            continue
        if command == "estimate" and option.name in OF_THE_ENGINE | {"nodes", "device"}:
            continue
        theirs = default_of(setting)
        same = option.default in (theirs, None) or (theirs is None and option.default is False)
        if not same:
            differing[option.name] = (option.default, theirs)
    assert differing == {}


def test_shared_choices_are_those_of_the_settings() -> None:
    for name, option in COMMON.items():
        allowed = choices_of(SETTINGS[name]) if name in SETTINGS else ()
        assert not allowed or not option.choices or set(allowed) == set(option.choices), name


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("trian", "Did you mean run?"),
        ("explain", "Did you mean estimate --breakdown?"),
        ("zzzz", "Choose one of run, check"),
        ("plan --batch 8", "There is no option --batch.\nDid you mean --global-batch-size?"),
        ("plan --launcher deepspeed", "Did you mean --engine?"),
        ("estimate --rank 8", "Did you mean --lora-rank"),
        ("plan --model lama-8b", "Did you mean llama-8b"),
        ("plan --model llama-8b --gpu H10", "Did you mean H100 SXM"),
        ("plan --model llama-8b --method lorra", "Did you mean lora"),
        ("estimate --model llama-8b --optimizer adam", "Did you mean adamw"),
        ("estimate --model llama-8b --over gpu", "Did you mean gpus"),
        ("estimate --model llama-8b --instance-type p5.48xlarg", "Did you mean p5.48xlarge"),
    ],
)
def test_a_misspelled_name_gets_similar_names_as_suggestions(words: str, advice: str) -> None:
    done = CliRunner().invoke(app, words.split(), prog_name="finetune")
    assert done.exit_code == 2
    assert advice in done.output


def test_the_shell_completes_closed_sets() -> None:
    command = load("plan")
    (method,) = (option for option in command.params if option.name == "method")
    with command.make_context("plan", [], resilient_parsing=True) as context:
        assert [item.value for item in method.shell_complete(context, "q")] == ["qlora"]
