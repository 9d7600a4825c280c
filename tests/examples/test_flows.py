"""The example flows, run as printed with a tiny model and little data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launchers.models import tiny_llama
from tests.decorators.conftest import Home

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """A folder with its own datastore, a tiny model and texts."""
    (tmp_path / ".metaflow").mkdir()
    tiny_llama.make(tmp_path / "tiny", config={**tiny_llama.CONFIG, "num_hidden_layers": 1})
    texts = [{"text": f"Ticket {number}: the printer does not print."} for number in range(64)]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps(row) for row in texts))
    return Home(tmp_path)


def run(home: Home, flow: str, *arguments: str) -> str:
    """Run an example; return its output."""
    done = home.python(str(EXAMPLES / flow), "run", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def greedy_answers(folder: Path, prompts: list[str]) -> list[str]:
    """Generate greedy answers with the chat template, one prompt at a time."""
    from launchers.inference import finished
    from launchers.inference.conversation import Conversation, Sampling, load_finetuned

    loaded = load_finetuned(finished.from_folder(folder), "cpu", folder)
    sampling = Sampling(max_new_tokens=4, temperature=0)
    return [Conversation(loaded=loaded, sampling=sampling).ask(prompt).text for prompt in prompts]


def test_batch_inference_answers_every_prompt_and_resumes_where_it_stopped(home: Home) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    prompts = [f"Say {number}." for number in range(20)]
    pq.write_table(pa.table({"prompt": prompts}), home.path / "prompts.parquet")
    arguments = ("--model", "tiny", "--prompts", "prompts.parquet", "--max-new-tokens", "4")
    output = run(home, "batch_inference_flow.py", *arguments)
    assert "answer: 1 CPU" in output, "sized by the estimator"
    answers = pq.read_table(home.path / "answers.parquet").to_pydict()
    assert answers["prompt"] == prompts
    assert answers["answer"] == greedy_answers(home.path / "tiny", prompts)

    stored = home.path / ".metaflow" / "BatchInferenceFlow" / "finetune" / "runs"
    parts = list(stored.rglob("*000000.parquet"))
    assert len(parts) == 1, "each batch is kept for a retry or a resumed run"


INTERRUPTED = """
import pathlib, sys, time
sys.path.insert(0, {folder!r})
import batch_inference_flow as example

def load(name, max_new_tokens):
    def generate(prompts):
        if "Say 16." in prompts and not pathlib.Path("mended").exists():
            if not pathlib.Path("failed").exists():
                time.sleep(12)  # until the answers so far are stored
                pathlib.Path("failed").touch()
            raise RuntimeError("interrupted")
        with open("answered", "a") as file:
            file.writelines(prompt + "\\n" for prompt in prompts)
        return [prompt.upper() for prompt in prompts]
    return generate

example.load = load
if __name__ == "__main__":
    example.BatchInferenceFlow()
"""


def test_resumed_batch_inference_answers_only_the_remaining_prompts(home: Home) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    prompts = [f"Say {number}." for number in range(20)]
    pq.write_table(pa.table({"prompt": prompts}), home.path / "prompts.parquet")
    flow = home.path / "interrupted.py"
    flow.write_text(INTERRUPTED.format(folder=str(EXAMPLES)))
    first = home.python(str(flow), "run", "--model", "tiny", "--prompts", "prompts.parquet")
    assert first.returncode == 1, first.stdout + first.stderr
    assert "Checkpoints of an earlier attempt" in first.stdout, "the retry has the first attempt's answers"
    (home.path / "mended").touch()
    done = home.python(str(flow), "resume")
    assert done.returncode == 0, done.stdout + done.stderr
    answers = pq.read_table(home.path / "answers.parquet").to_pydict()
    assert answers == {"prompt": prompts, "answer": [prompt.upper() for prompt in prompts]}
    assert (home.path / "answered").read_text().splitlines() == prompts, "each was answered once"


@pytest.mark.nightly  # tests/decorators/test_own_script.py trains on two nodes
def test_plain_ddp_trains_on_two_nodes(home: Home) -> None:
    assert "steps on each node: [20, 20]" in run(home, "ddp_flow.py", "--steps", "20")


@pytest.mark.nightly  # tests/decorators/test_sizing.py right-sizes over five runs
def test_the_second_run_of_a_data_flow_is_right_sized(home: Home) -> None:
    assert "no comparable earlier task" in run(home, "rightsized_flow.py")
    assert "used in 1 earlier task" in run(home, "rightsized_flow.py")


@pytest.mark.nightly
def test_trl_trains_on_two_nodes(home: Home) -> None:
    pytest.importorskip("trl")
    arguments = ("--model", str(home.path / "tiny"), "--data", str(home.path / "texts.jsonl"), "--steps", "4")
    assert "steps: 4" in run(home, "trl_flow.py", *arguments)


@pytest.mark.nightly
def test_accelerate_trains_with_deepspeed_in_two_processes(home: Home) -> None:
    pytest.importorskip("deepspeed")
    arguments = ("--model", str(home.path / "tiny"), "--steps", "3", "--gpus", "2", "--device", "cpu")
    assert "steps: 3" in run(home, "accelerate_flow.py", *arguments)


@pytest.mark.nightly
def test_lightning_trains(home: Home) -> None:
    pytest.importorskip("lightning")
    assert "steps: 3" in run(home, "lightning_flow.py", "--model", str(home.path / "tiny"), "--steps", "3")
