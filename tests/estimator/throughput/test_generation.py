"""Speed of generation: its range holds what was published, and moves as it must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published.generation import PublishedGeneration, runs
from estimator import hardware
from estimator.memory.generation import Batch
from estimator.models import find
from estimator.throughput.generation import balanced_sequences, forward_seconds, generation_speed

H100 = hardware.gpu("H100 SXM")
LLAMA = find("llama-8b")
BATCH = Batch(sequences=32, prompt_tokens=512, new_tokens=256)
compared = [run for run in runs() if not run.doubtful and not run.model.experts]


@pytest.mark.parametrize("run", compared, ids=lambda run: run.name)
def test_the_range_contains_every_published_run(run: PublishedGeneration) -> None:
    ends = generation_speed(run.model, run.gpu, run.batch).tokens_per_second
    assert ends[0] <= run.tokens_per_second <= ends[1]


def test_the_range_is_as_narrow_as_the_published_runs_allow() -> None:
    """Were an end further out than a tenth beyond the outermost run, it would say less than is known."""
    over = []
    for run in compared:
        slow, fast = generation_speed(run.model, run.gpu, run.batch).tokens_per_second or (0, 0)
        over.append((run.tokens_per_second / slow, run.tokens_per_second / fast))
    assert min(ratio for ratio, _ in over) < 1.1
    assert max(ratio for _, ratio in over) > 0.9


def test_the_fast_end_of_decoding_reads_the_weights_at_full_bandwidth() -> None:
    # 70B in bf16 at one sequence: 141 GB over 3.35 TB/s are 42 ms, of which the cache is next to nothing
    large = find("llama-70b")
    step = generation_speed(large, H100, replace(BATCH, sequences=1, prompt_tokens=1)).step_seconds
    assert step[0] == pytest.approx(2 * large.parameters / 3.35e12, rel=0.05)


def test_more_sequences_take_longer_and_give_more_tokens_per_second() -> None:
    found = [generation_speed(LLAMA, H100, replace(BATCH, sequences=n)) for n in (1, 8, 64, 512)]
    for end in (0, 1):
        for ranges in ([each.seconds for each in found], [each.tokens_per_second for each in found]):
            ends = [each[end] for each in ranges]
            assert ends == sorted(ends)


def test_a_sliding_window_makes_long_answers_faster() -> None:
    windowed = replace(LLAMA, sliding_window=1024, sliding_layers=LLAMA.layers)
    long = replace(BATCH, prompt_tokens=8192)
    plain, near = (generation_speed(model, H100, long).step_seconds for model in (LLAMA, windowed))
    assert near[1] < plain[1]


@pytest.mark.parametrize(
    ("model", "gpu", "words"),
    [("llama-8b", None, "this device"), ("mixtral-8x7b", "H100 SXM", "experts"), ("llama-8b", "T4", "T4")],
)
def test_unknown_values_are_shown_as_unknown(model: str, gpu: str | None, words: str) -> None:
    device = None if gpu is None else hardware.gpu(gpu)
    prediction = generation_speed(find(model), device, BATCH)
    assert prediction.seconds is None
    assert prediction.tokens_per_second is None
    assert words in prediction.basis
    assert forward_seconds(find(model), device, BATCH.sequences, BATCH.prompt_tokens) is None


def test_batches_beyond_the_balance_point_gain_no_throughput() -> None:
    assert balanced_sequences(H100) == int(989e12 / 3.35e12)
