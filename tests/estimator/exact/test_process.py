"""What the asking process sees: no torch, one clear line for each mistake, nothing left running."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, replace
from typing import Any

import pytest

from estimator import exact
from estimator.errors import UserError
from estimator.exact import process
from estimator.exact.support import untraceable
from estimator.models import find
from estimator.setup import Answers, LlamaAdapter, Setup
from tests.estimator.exact.shapes import LLAMA, MIXTRAL, QWEN2, TORCHTUNE, TRANSFORMERS


@pytest.mark.slow
def test_an_estimate_is_traced_in_a_child_process() -> None:
    estimated = exact.estimate(TORCHTUNE)
    assert estimated.parameters == LLAMA.parameters
    assert (
        estimated.peak_bytes
        == sum(estimated.categories.values())
        == max(m.total_bytes for m in estimated.moments)
    )
    assert dict(estimated.versions).keys() >= {"torch", "torchtune"}
    assert estimated.seconds > 0


def test_a_setup_is_restored_unchanged_in_the_tracing_process() -> None:
    setup = replace(TORCHTUNE, lora_targets=("q_proj", "v_proj"), method="lora", model=find("gpt-oss-20b"))
    setup = replace(setup, answers=Answers(length=64), llama_adapter=LlamaAdapter(start_layer=0))
    assert process.setup_from(json.loads(json.dumps(asdict(setup)))) == setup


def test_missing_torch_gives_one_line_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "find_spec", lambda _: None)
    with pytest.raises(UserError) as caught:
        exact.estimate(TORCHTUNE)
    assert caught.value.problem == "exact mode needs torch: pip install 'metaflow-finetune[train]'"


def test_a_trace_over_its_time_limit_is_killed_with_its_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    started: list[subprocess.Popen[str]] = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    begin = time.monotonic()
    with pytest.raises(UserError, match="longer than 0 s"):
        exact.estimate(TORCHTUNE, time_limit_s=0.2)
    assert time.monotonic() - begin < 5
    assert [child.poll() is not None for child in started] == [True]


ANSWER = """print('{"problem": "Too wide.", "advice": "Ask for less."}')"""


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise SystemExit('no memory left')", "The trace failed: no memory left"),
        (f"{ANSWER}; raise SystemExit('it is late')", "The trace failed: it is late"),
        ("", "The trace failed: exit code 0"),
        (ANSWER, "Too wide."),
    ],
)
def test_a_failed_tracing_process_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(process, "WORKER", ["-c", code])
    with pytest.raises(UserError) as caught:
        exact.estimate(TORCHTUNE)
    assert caught.value.problem == problem


@pytest.mark.slow
def test_the_error_message_of_a_model_is_shown() -> None:
    setup = replace(TRANSFORMERS, model=find("qwen-1.8b"))
    with pytest.raises(UserError, match=r"transformers has no qwen model of the shape of qwen-1\.8b"):
        exact.estimate(setup)


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (replace(TORCHTUNE, engine="litgpt"), "not of litgpt"),
        (replace(TORCHTUNE, model=MIXTRAL), "torchtune's mixtral models"),
        (replace(TRANSFORMERS, compile=True), "compiled code"),
        (replace(TORCHTUNE, sharding="fsdp", shard=2, flat_parameters=True), "FSDP1"),
        (replace(TORCHTUNE, tensor=8), "4 key/value heads over 8"),
        (replace(TORCHTUNE, model=QWEN2, tensor=2), "tied embeddings"),
        (replace(TORCHTUNE, method="lora", tensor=2), "cover adapters"),
        (replace(TORCHTUNE, method="lora", quantization="int8"), "int8"),
        (replace(TRANSFORMERS, model=find("bert-base-cased")), "encoders"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_untraceable_setup_is_refused_with_a_reason_before_a_process_starts(
    setup: Setup, reason: str
) -> None:
    assert reason in (untraceable(setup) or "")
    with pytest.raises(UserError, match="Exact mode cannot trace this step"):
        exact.estimate(setup)
