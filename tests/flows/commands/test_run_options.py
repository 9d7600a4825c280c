"""Options of `finetune run`: one per setting, without collisions with parameters of a flow."""

from __future__ import annotations

import pytest

from decorators._metaflow import run_parameters
from estimator.errors import UserError
from flows.commands.flow_commands import flow_class
from flows.commands.run_help import help_page
from flows.commands.run_options import OF_METAFLOW
from flows.finetune.flags import FLAGS
from launchers import settings
from launchers.settings.options import setting_options, translate

PARAMETERS, SWITCHES = run_parameters(flow_class("finetune"))


def translated(arguments: str) -> list[str]:
    return translate(arguments.split(), PARAMETERS, {*SWITCHES, *OF_METAFLOW})


def overrides(arguments: str) -> settings.Settings:
    translated_words = translated(arguments)
    return settings.build(
        {}, [translated_words[at + 1] for at, word in enumerate(translated_words) if word == "--set"]
    )


def test_every_setting_has_its_own_option() -> None:
    options = setting_options()
    assert len(options) == len(settings.dotted_names())
    for flag, setting in FLAGS.items():
        assert options[f"--{flag.replace('_', '-')}"] == setting
    assert not options.keys() & OF_METAFLOW.keys()


@pytest.mark.parametrize("name", settings.dotted_names())
def test_the_default_of_each_setting_can_be_given_as_its_option(name: str) -> None:
    value = settings.flat(settings.build({}))[name]
    if value in ("null", "{}", "[]", ""):
        return
    option = next(option for option, setting in setting_options().items() if setting == name)
    translated_words = translate([option, value], (), ["--set"])
    assert settings.flat(settings.build({}, translated_words[1::2]))[name] == value


def test_options_become_parameters_or_overrides() -> None:
    arguments = "--lr 1e-4 --lora-rank=16 --lora-targets q_proj,v_proj --packing --no-longest-first --tag x"
    assert translated(arguments) == [
        *("--lr", "1e-4", "--set", "lora.rank=16", "--set", "lora.targets=[q_proj,v_proj]"),
        *("--packing", "true", "--set", "longest_first=false", "--tag", "x"),
    ]
    chosen = overrides(arguments)
    assert (chosen.lora.rank, chosen.lora.targets, chosen.longest_first) == (16, ("q_proj", "v_proj"), False)


def test_a_string_value_is_passed_unchanged() -> None:
    values = translate(["--chat-template", "{{ bos_token }}: #1"], (), ())
    assert settings.build({}, values[1::2]).chat_template == "{{ bos_token }}: #1"
    values = translate(["--output-dir", "2026", "--team", "1e3"], (), ())
    chosen = settings.build({}, values[1::2])
    assert (chosen.output_dir, chosen.resources.team) == ("2026", "1e3")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ("--metod lora", "Did you mean --method"),
        ("--rank 8", "Did you mean --lora-rank"),
        ("--warmup-steps 8", "Did you mean --schedule-warmup-steps"),
        ("--batch-size 8", "Did you mean --global-batch-size?"),
        ("--zzzz 8", "`--help` lists the options."),
        ("--lora-rank", "Write --lora-rank VALUE."),
    ],
)
def test_an_unknown_option_gets_suggestions(arguments: str, advice: str) -> None:
    with pytest.raises(UserError) as error:
        translated(arguments)
    assert error.value.advice.startswith(advice)


def test_the_help_fits_a_screen_and_help_all_has_every_option() -> None:
    lines = help_page("finetune run").splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    shown = help_page("finetune run", everything=True)
    missing = [name for name in (*setting_options(), *OF_METAFLOW) if name not in shown]
    assert missing == []


def test_the_table_of_metaflows_options_is_complete() -> None:
    from metaflow.cli_components.run_cmds import run

    names = {text for option in run.params for text in option.opts if text.startswith("--")}
    assert names == set(OF_METAFLOW)
