"""Generate docs/settings.md, and the marked parts of other documents.

``python -m benchmarks.documents`` writes them. A part is enclosed by ``<!-- generated: NAME -->`` and
``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    busbw,
    exact_families,
    image_plans,
    measured_runs,
    method_table,
    record_reference,
    support_table,
)
from benchmarks.on_gpu import calls
from checklist.measurements import PHASES
from checklist.registry import CHECKS
from estimator import models
from estimator.models import untried
from estimator.option_names import option_name
from estimator.planning.summary import MORE
from estimator.vocabulary import LAUNCHED_ENGINES
from flows.finetune import planning
from launchers import settings
from launchers.run.job import unsupported
from launchers.settings import conversion_rules

ROOT = Path(__file__).parents[1]
WIDTH = 110  # of a line of text


def planned(parameters: dict[str, Any], backend: str) -> str:
    """Return what ``--plan-only`` prints for these parameters."""
    values = {"settings": settings.parse_yaml(""), **parameters, "plan_only": True, "no_calibration": True}
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        planning.plan_from_parameters(values, backend)  # type: ignore[arg-type]
    return output.getvalue()


def settings_page() -> str:
    """Build docs/settings.md."""
    lines = [
        "# Settings",
        "",
        "After this page you can look up every setting with its option, default and values.",
        "`finetune settings WORD` searches the same list.",
        "",
        "Settings are given in a YAML file, as options of `finetune run`, or by `--set NAME=VALUE`. Options",
        "override the file; `--set` overrides both. The artifact `used_settings` and `settings.yaml` next to",
        "the model contain the values that were used. A relative path in the file is looked up next to the",
        "file first, then in the working folder.",
        "",
        "```bash",
        "finetune run my.yaml --lr 1e-5 --lora-rank 16",
        "```",
        "",
        "```yaml",
        "# my.yaml",
        "model: llama-3.2-1b",
        "method: lora",
        "seq_len: 1024",
        "optimizer:",
        "  weight_decay: 0.01",
        "```",
        "",
        "| Value | Written as |",
        "|---|---|",
        "| empty | `--set clip_grad_norm=` |",
        "| a list | `--set 'lora.targets=[q_proj, v_proj]'` |",
        "| a mapping | `--set 'engine_options={log_every_n_steps: 10}'` |",
        "| several trackers | `--tracker tensorboard,wandb` |",
        "",
        "Editors check the file with `launchers/settings/settings.schema.json`. With torchtune, keys",
        "of `engine_options` that follow from the plan are refused: the accounting of a run depends on them.",
        "",
    ]
    header = ["| Setting | Option | Default | Values | Meaning |", "|---|---|---|---|---|"]
    schema = settings.json_schema()
    sections: dict[str, list[str]] = {}
    for name in settings.dotted_names():
        section = name.rpartition(".")[0]
        values = _schema_of(schema, name)
        cells = (f"`{name}`", f"`{option_name(name)}`", _default(values), _takes(values))
        text = settings.help_of(name).replace("|", "\\|")
        sections.setdefault(section, []).append(f"| {' | '.join(cells)} | {text} |")
    for section, table in sections.items():
        if section:
            lines += ["", f"## {section}", "", settings.help_of(section), ""]
        lines += [*header, *table]
    return "\n".join([*lines, ""])


def _schema_of(schema: dict[str, Any], name: str) -> dict[str, Any]:
    values: dict[str, Any] = schema
    for part in name.split("."):
        values = values["properties"][part]
        if "$ref" in values:
            values = schema["$defs"][values["$ref"].rpartition("/")[2]]
    return values


def _default(values: dict[str, Any]) -> str:
    default = values.get("default", {})
    if default in (None, [], {}):
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _takes(values: dict[str, Any]) -> str:
    if "anyOf" in values:
        return " or ".join(text for option in values["anyOf"] if (text := _takes(option)))
    if "enum" in values:
        return ", ".join(f"`{value}`" for value in values["enum"])
    if "const" in values:
        return f"`{values['const']}`"
    kind = values.get("type")
    if kind == "array":
        if "prefixItems" in values:
            return f"{len(values['prefixItems'])} numbers"
        return f"list of {_takes(values['items'])}"
    words = {"integer": "whole number", "number": "number", "boolean": "`true`, `false`", "string": "text"}
    limits = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    text = words.get(str(kind), "mapping" if kind == "object" else "")
    return " ".join([text, *(f"{word} {values[key]:g}" for key, word in limits.items() if key in values)])


def plan_block() -> str:
    """Build the plan that README.md shows."""
    return "```text\n" + planned({"model": "llama-8b", "method": "lora"}, "kubernetes").strip() + "\n```"


def rejection_block() -> str:
    """Build the stages of rejection sampling that docs/rejection.md shows."""
    parameters = {
        "model": "llama-8b",
        "method": "full",
        "instance_type": "a3-highgpu-8g",
        "dataset": "python-docs",
        "score": f"{ROOT / 'examples' / 'short_answers.py'}:short_answers",
        "set": ["rejection.prompts=2000"],
        "from_catalogue": True,
    }
    stages = planned(parameters, "kubernetes").partition("Rejection sampling:")
    return "```text\n" + "".join(stages[1:]).replace(MORE, "").strip() + "\n```"


def models_table() -> str:
    lines = ["| Name | Hugging Face id | Parameters | Longest sequence | |", "|---|---|---|---|---|"]
    for name in models.names():
        spec = models.find(name)
        size = (
            f"{spec.parameters / 1e9:.1f} B" if spec.parameters >= 1e8 else f"{spec.parameters / 1e6:.1f} M"
        )
        notes = [] if runs_somewhere(name) else ["planning only"]
        notes += ["requires a token"] if spec.gated else []
        notes += [f"license {spec.license}"] if spec.license else []
        cells = (f"`{name}`", spec.hf_id or "", size, f"{spec.max_seq_len:,}", ", ".join(notes))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


ANSWERING = [name for name in LAUNCHED_ENGINES if name != "trl"]  # which learns task grpo alone
COMBINATIONS = [(engine, method) for engine in ANSWERING for method in ("full", "lora", "qlora")]
# What runs where is one column for engines that run the same loop and refuse the same
COLUMNS = [
    (group, method)
    for group in (("torchtune",), ("deepspeed", "fsdp2"))
    for method in ("full", "lora", "qlora")
]


def refusal(model: str, engine: str, method: str) -> str | None:
    """Return why an engine refuses a model and a method with default settings, or None."""
    job = settings.build({"model": model, "method": method, "engine": engine})
    return unsupported(engine, job, models.find(model))


def refusal_of_column(model: str, group: tuple[str, ...], method: str) -> str | None:
    """Return why the engines of a column refuse; all of them must agree."""
    reasons = [refusal(model, engine, method) for engine in group]
    assert len({reason is None for reason in reasons}) == 1, f"{group} disagree on {model} {method}"
    return reasons[0]


def runs_somewhere(model: str) -> bool:
    """Return whether any engine trains the model with any method; others can only be estimated."""
    return any(refusal(model, *combination) is None for combination in COMBINATIONS)


def proofs() -> str:
    """Return the families that each engine has trained, from benchmarks/results/support.csv."""
    rows = [row for row in support_table.read() if row.part == "families"]
    results = {(row.family, row.engine, row.method): row.result for row in rows}
    table = _results_table("Families", ("deepspeed", "fsdp2"), ("full", "lora", "packing"), results)
    return f"{table}\n\n{_releases(rows)}"


def _results_table(
    title: str, engines: Sequence[str], columns: Sequence[str], results: Mapping[tuple[str, str, str], str]
) -> str:
    """Format what each engine runs, rows with equal cells as one row, then the reasons for refusals.

    ``results``: (name, engine, column) -> result.
    """
    equal: dict[tuple[str, ...], list[str]] = {}
    names_of: dict[str, list[str]] = {}
    for name in dict.fromkeys(name for name, _, _ in results):
        cells = []
        for engine in engines:
            run = [column for column in columns if results[name, engine, column] == support_table.RUNS]
            cells.append(", ".join(run) or "no")
        equal.setdefault(tuple(cells), []).append(f"`{name}`")
        refused = [results[name, engine, column] for engine in engines for column in columns]
        for clause in dict.fromkeys(result for result in refused if result != support_table.RUNS):
            names_of.setdefault(_general(clause, name), []).append(f"`{name}`")
    lines = [f"| {title} | {' | '.join(engines)} |", "|---" * (len(engines) + 1) + "|"]
    lines += [f"| {', '.join(names)} | {' | '.join(shown)} |" for shown, names in equal.items()]
    reasons = [textwrap.fill(f"- {', '.join(names)}: {clause}.", WIDTH) for clause, names in names_of.items()]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _releases(rows: Sequence[support_table.Row]) -> str:
    return textwrap.fill(support_table.tested_with(rows), WIDTH)


def proved_methods() -> str:
    """Build the table of methods that each engine has trained with tiny-llama (results/support.csv)."""
    rows = [row for row in support_table.read() if row.part == "methods"]
    results = {(row.method, row.engine, _nodes(row)): row.result for row in rows}
    return f"{_results_table('Method', ANSWERING, NODES, results)}\n\n{_releases(rows)}"


NODES = ("1 node", "2 nodes")


def _nodes(row: support_table.Row) -> str:
    return NODES[row.nodes - 1]


def proved_tasks() -> str:
    """Build the table of tasks, each by some methods; SFT's rows are those of the methods."""
    rows = support_table.read()
    methods = [row.method for row in rows if row.part == "tasks"]
    answering = [row for row in rows if row.engine != "trl" and row.method in methods]
    tables = []
    for engines_of, chosen in (
        (ANSWERING, [row for row in answering if row.part in ("methods", "tasks")]),
        (["trl"], [row for row in rows if row.engine == "trl" and row.part == "tasks"]),
    ):
        results = {(f"{row.task} {row.method}", row.engine, _nodes(row)): row.result for row in chosen}
        tables.append(_results_table("Task", engines_of, NODES, results))
    tested = [row for row in rows if row.part == "tasks"]
    return "\n\n".join([*tables, _releases(tested)])


def models_by_engine() -> str:
    """Build the table of model families that any engine trains, with a column per engine and method.

    One row per family; a model that differs from most models of its family is listed separately.
    """
    trained: dict[str, dict[tuple[str | None, ...], list[str]]] = {}
    planned_only: dict[str, list[str]] = {}
    for name in models.names():
        family = models.find(name).family
        if runs_somewhere(name):
            reasons = [refusal_of_column(name, *column) for column in COLUMNS]
            general = tuple(reason and _general(reason, name) for reason in reasons)
            trained.setdefault(family, {}).setdefault(general, []).append(name)
        else:
            clause = refusal(name, "deepspeed", "full") or ""
            planned_only.setdefault(clause.replace(name, "it"), []).append(name)
    rows: dict[tuple[str | None, ...], list[str]] = {}
    for family, groups in trained.items():
        usual = max(groups, key=lambda general: len(groups[general]))
        for general, names in groups.items():
            labels = [f"`{family}`"] if general == usual else [f"model `{name}`" for name in names]
            rows.setdefault(general, []).extend(labels)
    heads = list(dict.fromkeys(engines for engines, _ in COLUMNS))
    lines = [f"| Family (`model_type`) | {' | '.join(map(', '.join, heads))} | Refused, because |"]
    lines.append("|---" * (len(heads) + 2) + "|")
    for general, labels in rows.items():
        methods: dict[tuple[str, ...], list[str]] = {engines: [] for engines in heads}
        for (engines, method), reason in zip(COLUMNS, general, strict=True):
            methods[engines] += [] if reason else [method]
        cells = [", ".join(methods[engines]) or "no" for engines in heads]
        clauses = dict.fromkeys(reason for reason in general if reason)
        lines.append(f"| {', '.join(labels)} | {' | '.join(cells)} | {'; '.join(clauses)} |")
    lines += ["", "No engine trains these; `finetune plan` plans for them.", ""]
    lines += ["| Models | Because |", "|---|---|"]
    lines += [f"| {_patterns(names)} | {clause} |" for clause, names in planned_only.items()]
    return "\n".join(lines)


def _patterns(names: Sequence[str]) -> str:
    """Return names with a common beginning as one pattern: `mpt-pretrain-*`."""
    words = zip(*(name.split("-") for name in names), strict=False)
    common = [word[0] for word in itertools.takewhile(lambda word: len(set(word)) == 1, words)]
    return f"`{'-'.join(common)}-*`" if common and names[1:] else ", ".join(f"`{name}`" for name in names)


def _general(reason: str, name: str) -> str:
    """Return a reason for a refusal without what describes this model, family or task only."""
    name = re.escape(name)
    specific = (
        rf" \({name} has [^)]*\)",
        rf", and (a )?{name}('s| has| is| model is) [^;]*",
        rf", and they are most of {name}",
        rf"(?<=transformers' ){name} ",
        r"^(packing|task \w+|lora\.\w+|[\w-]+): ",
    )
    return re.sub("|".join(specific), "", reason)


def listed(words: Iterable[str], conjunction: str = "and") -> str:
    """Join distinct words: "a, b and c"."""
    *head, last = dict.fromkeys(words)
    return f"{', '.join(head)} {conjunction} {last}" if head else last


def planned_families() -> str:
    """Write the paragraphs of docs/models.md on supported values of model_type."""
    rows = support_table.read()
    trained = dict.fromkeys(row.family for row in rows if row.part == "families")
    rest = [family for family in models.FAMILIES if family not in trained]
    sentence = (
        "A text-only model works by Hugging Face id, as a folder or from S3, in 16 or 32 bits, if the "
        f"`model_type` of its `config.json` is one of the {len(trained)} families in "
        f"[support.md](support.md#families). Models of type {listed(rest)} can be planned for, not "
        "trained."
    )
    more = (
        f"The {len(untried.classes())} other causal models of transformers 5.23 "
        "([names](../estimator/data/untried_families.csv)) work if their `config.json` has the usual fields. "
        "Their plans call them untested, and use memory and speed of a Llama of the same widths. "
        "Packing is refused for them, as documents might attend to each other."
    )
    return "\n\n".join(textwrap.fill(text, WIDTH) for text in (sentence, more))


def errors_of_the_estimator() -> str:
    """Build the accuracy section of docs/accuracy.md from the committed scores of both fits."""
    results = ROOT / "benchmarks" / "results"
    memory = json.loads((results / "estimator_fit.json").read_text())
    speed = json.loads((results / "throughput_fit.json").read_text())["all"]
    scores = (
        ("memory peaks with an exact configuration", memory["in_sample"]["all"]),
        ("the same, with the row's source left out of the fit", memory["held_out_by_source"]["all"]),
        ("speeds", speed["fitted"]),
        ("speeds that can be predicted with their source left out", speed["source held out"]),
    )
    lines = [
        "| Published values | Rows | Median error | 95 % are within | In the range |",
        "|---|---|---|---|---|",
    ]
    for title, score in scores:
        rest = [f"{score[key]:.0%}" if key in score else "" for key in ("p95_abs_error", "covered")]
        lines.append(f"| {title} | {score['rows']} | {score['median_abs_error']:.1%} | {' | '.join(rest)} |")
    verdicts = memory["verdict"]["in_sample"]
    lines += [
        *("", "| Published runs | Runs | Wrong verdicts |", "|---|---|---|"),
        f"| succeeded | {verdicts['ran']} | {verdicts['refused_of_ran']} do not fit |",
        f"| ran out of memory | {verdicts['oom']} | {verdicts['accepted_of_oom']} fit |",
    ]
    return "\n".join(lines)


def risk_table() -> str:
    """Build the table of docs/estimator.md that compares predicted risk with observed frequency."""
    fit = json.loads((ROOT / "benchmarks" / "results" / "estimator_fit.json").read_text())
    lines = [
        "| Predicted risk | Runs | Sources | Predicted, mean | Ran out of memory |",
        "|---|---|---|---|---|",
    ]
    for row in fit["risk"]:
        limits = f"{100 * row['from']:g} to {100 * row['to']:g} %"
        share = f"{row['oom']} ({row['oom'] / row['runs']:.1%})"
        lines.append(f"| {limits} | {row['runs']} | {row['sources']} | {row['predicted']:.1%} | {share} |")
    return "\n".join(lines)


def headroom_table() -> str:
    """Build the table of docs/estimator.md that counts published runs by predicted headroom."""
    fit = json.loads((ROOT / "benchmarks" / "results" / "estimator_fit.json").read_text())
    lines = [
        "| Predicted to spare | Runs | Sources | Ran out of memory | `fits` | `fits`, ran out of memory |",
        "|---|---|---|---|---|---|",
    ]
    for row in fit["headroom"]:
        cells = (row["runs"], row["sources"], row["oom"], row["fits"], row["oom_of_fits"])
        limits = f"{100 * row['from']:g} to {100 * row['to']:g} %"
        lines.append(f"| {limits} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def checks_table() -> str:
    """Build the table of all checks, by phase."""
    lines = ["| Phase | Check | What it verifies |", "|---|---|---|"]
    for phase in (*PHASES, None):
        rows = [check for check in CHECKS.values() if check.phase == phase]
        for number, check in enumerate(rows):
            label = "" if number else phase or "all"
            lines.append(f"| {label} | `{check.name}` | {check.description} |")
    return "\n".join(lines)


def conversions() -> str:
    """Build the table of settings and their names in other tools."""
    words: dict[str, dict[str, list[str]]] = {}
    for tool, rules in conversion_rules.RULES.items():
        for key, rule in rules.items():
            if rule.setting:
                words.setdefault(rule.setting, {}).setdefault(tool, []).append(f"`{key}`")
    tools = tuple(conversion_rules.RULES)
    lines = [f"| Setting | {' | '.join(tools)} |", "|---" * (1 + len(tools)) + "|"]
    for setting in sorted(words):
        cells = [", ".join(words[setting].get(tool, [])) for tool in tools]
        lines.append(f"| `{setting}` | {' | '.join(cells)} |")
    return "\n".join(lines)


GENERATED = {
    "checks": ("docs/checklist.md", checks_table),
    "bandwidth": ("docs/checklist-rules.md", busbw.documented),
    "conversions": ("docs/convert.md", conversions),
    "plan": ("README.md", plan_block),
    "rejection": ("docs/rejection.md", rejection_block),
    "measured": ("docs/accuracy.md", measured_runs.table),
    "errors": ("docs/accuracy.md", errors_of_the_estimator),
    "exact families": ("benchmarks/results/exact_families.md", exact_families.table),
    "families outside the goals": ("docs/accuracy.md", exact_families.missed),
    "risk": ("docs/estimator.md", risk_table),
    "headroom": ("docs/estimator.md", headroom_table),
    "models": ("docs/known-models.md", models_table),
    "families": ("docs/models.md", planned_families),
    "models by engine": ("docs/methods.md", models_by_engine),
    "methods": ("docs/support.md", proved_methods),
    "tasks": ("docs/support.md", proved_tasks),
    "proofs": ("docs/support.md", proofs),
    "images": ("docs/images.md", image_plans.table),
    "method-memory": ("docs/which-method.md", method_table.methods),
    "method-by-gpu": ("docs/which-method.md", method_table.table),
    "records": ("docs/artifacts.md", record_reference.tables),
    "calls": ("docs/measure-gpu.md", calls.table),
}


def with_generated(name: str, text: str) -> str:
    """Return a document's text with its generated part renewed."""
    part = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    content = GENERATED[name][1]()
    renewed, count = part.subn(lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text)
    assert count == 1, f"{GENERATED[name][0]} has no part for {name}"
    return renewed


def write() -> None:
    (ROOT / "docs" / "settings.md").write_text(settings_page())
    for name, (file, _) in GENERATED.items():
        path = ROOT / file
        path.write_text(with_generated(name, path.read_text()))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    write()
