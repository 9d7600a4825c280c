"""result.json: versioned, read back without loss, and valid by its schema."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from checklist import measurements, result
from checklist.verdict import judge
from estimator.errors import UserError
from tests.checklist.clusters import Cluster
from tests.checklist.runs import cpu_run, gpu_run, records_of_runs, with_facts, with_pairs


@functools.cache
def results() -> dict[str, result.Result]:
    sick = judge(
        with_pairs(cpu_run(4), Cluster(nodes=4, transmit={2: 0.25}, cut=frozenset({(0, 1), (1, 0)})))
    )
    return {
        "healthy": judge(gpu_run()),
        "sick": sick,
        "still open": judge(cpu_run(4), open_failures=sick.open_failures()),
        "with a past": judge(gpu_run(), history=records_of_runs(judge(gpu_run()))),
        "nothing measured": judge(
            dataclasses.replace(cpu_run(), facts=(), pairs=(), probes=(), collectives=())
        ),
        "an odd host": judge(with_facts(gpu_run(), 0, nic="lo", zone=None)),
    }


def test_results_survive_json_and_match_the_schema() -> None:
    schema = json.loads(result.SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name, result_made in results().items():
        text = result.to_json(result_made)
        assert result.from_json(text) == result_made, name
        validator.validate(json.loads(text))


def test_the_shipped_schema_matches_the_classes() -> None:
    assert result.SCHEMA_FILE.read_text() == result.schema_text(), "run python -m checklist.result"


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": "GOOD"},
        {"bad_nodes": "none"},
        {"surprise": 1},
        {"checks": [{"check": "mesh"}]},
    ],
)
def test_the_schema_rejects_invalid_results(change: dict[str, Any]) -> None:
    values = json.loads(result.to_json(judge(gpu_run()))) | change
    schema = json.loads(result.SCHEMA_FILE.read_text())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, schema)
    with pytest.raises(UserError):
        result.from_json(json.dumps(values))


def test_a_result_of_another_version_is_refused() -> None:
    values = json.loads(result.to_json(judge(gpu_run()))) | {"version": 99}
    with pytest.raises(UserError, match="has schema version 99; this program reads 2"):
        result.from_json(json.dumps(values))
    with pytest.raises(UserError, match="is not JSON"):
        result.from_json("{")


def test_a_result_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    result_made = judge(gpu_run())
    file = tmp_path / "result.json"
    result.write(result_made, file)
    assert result.read(file) == result_made
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(UserError, match="cannot be written"):
        result.write(result_made, tmp_path / "missing" / "result.json")
    with pytest.raises(UserError, match="cannot be read: No such file"):
        result.read(tmp_path / "other.json")


@pytest.mark.parametrize(("name", "code"), [("healthy", 0), ("sick", 1), ("nothing measured", 3)])
def test_the_exit_status_follows_the_verdict(name: str, code: int) -> None:
    assert results()[name].exit_code == code


def test_measurements_survive_json_and_invalid_values_are_refused() -> None:
    run = gpu_run()
    text = measurements.to_json(run)
    assert measurements.from_json(text) == run
    for wrong, message in (
        (text.replace('"seconds": 60.0', '"seconds": "long"'), "Measurements.seconds is 'long'"),
        (text.replace('"version": 2', '"version": 3', 1), "have schema version 3; this program reads 2"),
        (text[:-5], "are not JSON"),
    ):
        with pytest.raises(UserError, match=message):
            measurements.from_json(wrong)


def test_importing_the_judges_needs_neither_torch_nor_metaflow() -> None:
    code = (
        "import sys, checklist, checklist.result, checklist.verdict, checklist.past_runs;"
        "import checklist.analysis.diagnosis;"
        "heavy = {'torch', 'metaflow', 'pydantic', 'kubernetes', 'decorators', 'launchers'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
