"""The rejection flow as a user runs it: the mean score rises, and finished shards are not repeated."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.rejection.node import answers_in, batch_limit
from launchers.models import tiny_llama
from launchers.rejection import answers as rows
from launchers.rejection.answers import Answers, Scores
from launchers.rejection.generation import GenerationRequest, generate
from launchers.rejection.scoring import load_function
from launchers.rejection.selection import select
from launchers.settings import Settings
from tests.conftest import write_sums
from tests.flows.conftest import environment, left_behind, read_artifacts, read_card, start_flow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FLOW = Path(__file__).parents[2] / "flows" / "rejection_flow.py"
FUNCTIONS = """
import time

def share_of_e(prompt, answer):
    letters = [letter for letter in answer.lower() if letter.isalpha()]
    return letters.count("e") / len(letters) if letters else 0.0

def slow(prompt, answer):
    with open("calls", "a") as file:
        file.write("x")
    time.sleep(0.03)
    return len(answer)

def nan(prompt, answer):
    return float("nan")
"""
SHARDS = 4  # of sixty prompts with four answers to each
SHORT = (
    "--max-steps=2",
    "--global-batch-size=4",
    "--set=rejection.max_new_tokens=64",
    "--set=evaluation.generations=0",
    "--set=evaluation.fraction=0.05",
)


class Flow:
    """Successive runs of the flow in one folder with one datastore."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "functions.py").write_text(FUNCTIONS)
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str) -> None:
        self.process = start_flow(self.home, [*arguments], FLOW)

    def run(self, *arguments: str, timeout: float = 800) -> int:
        """Run the flow and return its exit status."""
        self.start(*arguments)
        return self.end(timeout)

    def end(self, timeout: float = 800) -> int:
        status = self.process.wait(timeout)
        assert left_behind(self.home) == []
        return status

    @property
    def log(self) -> str:
        return (self.home / "log").read_text(errors="replace")

    @property
    def run_id(self) -> str:
        return (self.home / "run_id").read_text()

    def wait_for(self, condition: Callable[[], Any], within: float = 240) -> Any:
        assert self.process is not None
        deadline = time.monotonic() + within
        while not (value := condition()):
            assert self.process.poll() is None, f"the run ended first:\n{self.log}"
            assert time.monotonic() < deadline, f"not within {within:g} s:\n{self.log}"
            time.sleep(0.02)
        return value

    def pid_of(self, module: str) -> int | None:
        pids = [process.pid for process in left_behind(self.home, wait_s=0) if module in process.cmdline()]
        return pids[0] if pids else None

    def finished(self, name: str) -> list[str]:
        """Return the shards of answers or scores that the run reports as finished."""
        return re.findall(rf"(?<!compared-){name}: shard (\d+) of {SHARDS} is finished", self.log)

    def artifacts(self) -> dict[str, Any]:
        return read_artifacts(self.home, environment(self.home), f"RejectionFlow/{self.run_id}")

    def card(self, step: str) -> str:
        """Return the content of the card of a step."""
        return read_card(self.home, environment(self.home), FLOW, f"{self.run_id}/{step}", "rejection")


@pytest.fixture
def flow(tmp_path: Path) -> Iterator[Flow]:
    started = Flow(tmp_path)
    yield started
    for process in left_behind(tmp_path, wait_s=0):
        process.kill()


def scored_here(report_of_run: dict[str, Any], home: Path) -> tuple[list[Answers], list[Scores]]:
    """Generate with transformers in this process by plan and settings of that run, and score."""
    prompts, settings = report_of_run["prompts"], by_transformers(report_of_run["used_settings"])
    (home / "again").mkdir()
    model = tiny_llama.make(home / "again" / "model")
    rows.write_rows(home / "again" / "prompts.jsonl", prompts)
    request = GenerationRequest(
        base_dir=model,
        model_dir=model,
        prompts=home / "again" / "prompts.jsonl",
        work_dir=home / "again",
        shards_dir=home / "again" / "shards",
        settings=settings,
        device="cpu",
        limit=batch_limit(report_of_run["plan"]),
    )
    generate(request, lambda *_: None)
    drawn = answers_in(request.shards_dir, range(request.count()))
    function = load_function(f"{home / 'functions.py'}:share_of_e", "share_of_e")
    shown = {prompt.index: prompt.shown for prompt in prompts}
    scores = [
        Scores(index=each.index, scores=tuple(function(shown[each.index], a.text) for a in each.answers))
        for each in drawn
    ]
    return drawn, scores


def by_transformers(settings: Settings) -> Settings:
    """The same settings with the generator used without vLLM."""
    drawing = {"generator": "transformers", "generator_python": None}
    return settings.model_copy(update={"rejection": settings.rejection.model_copy(update=drawing)})


@pytest.mark.nightly  # two nodes draw as one in tests/launchers/rejection, too
def test_two_nodes_generate_the_answers_of_one_and_the_mean_score_rises(flow: Flow) -> None:
    status = flow.run(
        "run",
        "--score=functions.py:share_of_e",
        "--epochs=3",
        "--set=rejection.prompts=200",
        "--set=rejection.max_new_tokens=16",
        "--set=rejection.nodes=2",
        "--set=evaluation.fraction=0.2",
        "--set=evaluation.generations=1",
    )
    assert status == 0, flow.log
    assert "at most 12,800 tokens are generated, 800 answers are scored" in " ".join(flow.log.split())
    artifacts = flow.artifacts()
    selection, comparison = artifacts["selection"], artifacts["comparison"]
    assert (selection.overview.drawn.answers, selection.kept.answers) == (800, 200)
    assert selection.kept.mean > selection.overview.drawn.mean + 0.02
    assert comparison.prompts == 40
    assert comparison.after > comparison.before + 0.01
    assert comparison.text() in flow.log
    assert "Sampled answers" in flow.card("generate")
    drawn, scores = scored_here(artifacts, flow.home)
    assert (
        select(artifacts["prompts"], drawn, scores, artifacts["used_settings"].rejection)[0]
        == artifacts["kept"]
    )
    for step in ("score", "select"):
        page = flow.card(step)
        assert "Best answers" in page
        assert "Worst answers" in page
    page = (flow.home / "finetuned" / flow.run_id / "model" / "README.md").read_text()
    assert "finetune flow rejection" in page


@pytest.mark.nightly
def test_finished_shards_are_not_repeated_after_kill_9(flow: Flow) -> None:
    data = write_sums(flow.home / "sums.jsonl")
    flow.start("run", "--score=functions.py:slow", f"--dataset={data}", *SHORT)
    flow.wait_for(lambda: flow.finished("answers"))
    os.kill(flow.wait_for(lambda: flow.pid_of("launchers.rejection.generation")), signal.SIGKILL)
    flow.wait_for(lambda: "/score/" in flow.log)
    assert "was ended by SIGKILL (9)" in flow.log
    assert re.search(rf"answers: \d of {SHARDS} shards exist already", flow.log)
    assert sorted(flow.finished("answers")) == [str(shard) for shard in range(1, SHARDS + 1)]

    flow.wait_for(lambda: len(flow.finished("scores")) >= 2)
    doomed = left_behind(flow.home, wait_s=0)
    os.kill(flow.process.pid, signal.SIGKILL)
    psutil.wait_procs(doomed, timeout=30)
    earlier = flow.finished("scores")
    assert len(earlier) < SHARDS

    assert flow.run("resume", "--origin-run-id", flow.run_id) == 0, flow.log
    assert flow.finished("answers") == [], "nothing is generated again"
    assert f"scores: {len(earlier)} of {SHARDS} shards exist already" in flow.log
    assert sorted([*earlier, *flow.finished("scores")]) == [str(shard) for shard in range(1, SHARDS + 1)]
    assert flow.artifacts()["selection"].overview.drawn.answers == 240


@pytest.mark.nightly
def test_answers_generated_by_vllm_in_another_python_are_selected_and_compared(flow: Flow) -> None:
    python = os.environ.get("VLLM_PYTHON")  # of an environment that .ci/run makes
    if python is None:
        pytest.skip("VLLM_PYTHON names no Python that has vLLM (docs/rejection.md#vllm)")
    drawn = ("prompts=60", "max_new_tokens=16", "generator=vllm", f"generator_python={python}")
    options = [f"--set=rejection.{each}" for each in drawn]
    short = ["--epochs=1", "--set=evaluation.fraction=0.2", "--set=evaluation.generations=0"]
    assert flow.run("run", "--score=functions.py:share_of_e", *options, *short) == 0, flow.log
    artifacts = flow.artifacts()
    selection, comparison = artifacts["selection"], artifacts["comparison"]
    assert selection.overview.drawn.answers == 240
    assert selection.kept.mean > selection.overview.drawn.mean + 0.02
    # transformers draws others, of the same model: their mean score is near
    _, scores = scored_here(artifacts, flow.home)
    theirs = [score for each in scores for score in each.scores]
    assert selection.overview.drawn.mean == pytest.approx(sum(theirs) / len(theirs), abs=0.02)
    assert comparison.prompts == 12
    assert comparison.text() in flow.log


def test_a_user_error_is_named_before_the_run(flow: Flow) -> None:
    assert flow.run("run", "--score=functions.py:nan") != 0
    assert "Scoring function functions.py:nan returned nan" in " ".join(flow.log.split())
    assert "Traceback" not in flow.log
    assert "Workflow starting" not in flow.log
