"""NEFTune compared with transformers, and with every engine on one process, two, and after a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from launchers.dataset.prepared import Prepared
from launchers.dataset.seeding import random_stream
from launchers.engines.neftune import EmbeddingNoise
from launchers.gang.job import TrainJob
from launchers.gang.rank import RankEnv
from tests.launchers.engines.loop import runs
from tests.optional import require_torchtune

STEPS, BATCH, ALPHA, WIDTH = 3, 4, 5.0, 32
ALONE = RankEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, node=0)


def job_of(folder: Path, rows: list[Any], **settings: Any) -> TrainJob:
    data = runs.make_data(folder / "data", rows, batch=1, steps=STEPS)
    values = {"neftune_alpha": ALPHA, **settings}
    return runs.make_job(folder, folder, data, steps=STEPS, world=1, micro=1, settings=values)


def noised(
    job: TrainJob, tokens: torch.Tensor, step: int = 1, env: RankEnv = ALONE
) -> tuple[torch.nn.Embedding, torch.Tensor]:
    embedding = torch.nn.Embedding(runs.VOCAB, WIDTH)
    noise = EmbeddingNoise(embedding, job, env, Prepared(job.data_dir))
    noise.begin(step)
    with torch.no_grad():
        plain = embedding(tokens)
    return embedding, embedding(tokens).detach() - plain


def test_a_document_gets_the_same_noise_as_in_transformers(tmp_path: Path) -> None:
    (row,) = runs.documents(1)
    tokens = torch.from_numpy(row.tokens).long()[None]
    embedding, ours = noised(job_of(tmp_path, [row], seed=3), tokens, step=2)
    theirs = torch.nn.Embedding.from_pretrained(embedding.weight.detach())
    theirs.neftune_noise_alpha = ALPHA
    theirs.register_forward_hook(neftune_post_forward_hook)
    torch.manual_seed(int(random_stream(3, "neftune", 1).integers(2**63)))
    torch.testing.assert_close(ours, theirs(tokens) - theirs.weight[tokens], rtol=0, atol=0)
    limit = ALPHA / (tokens.shape[1] * WIDTH) ** 0.5
    assert 0.9 * limit < float(ours.abs().max()) <= limit * 1.001


def test_padding_has_no_noise_and_each_packed_document_is_scaled_by_its_length(tmp_path: Path) -> None:
    first, second = runs.documents(2)
    job = job_of(tmp_path, [runs.joined([first, second])])
    padded = torch.zeros(1, 60, dtype=torch.long)
    _, noise = noised(job, padded)
    long, both = len(first.tokens), len(first.tokens) + len(second.tokens)
    assert float(noise[0, both:].abs().max()) == 0
    for part, length in ((noise[0, :long], long), (noise[0, long:both], both - long)):
        limit = ALPHA / (length * WIDTH) ** 0.5
        assert 0.9 * limit < float(part.abs().max()) <= limit * 1.001


def test_rows_joined_without_padding_have_the_noise_of_padded_rows(tmp_path: Path) -> None:
    rows = runs.documents(2)
    data = runs.make_data(tmp_path / "data", rows, batch=2, steps=1)
    job = runs.make_job(
        tmp_path, tmp_path, data, steps=1, world=1, micro=2, settings={"neftune_alpha": ALPHA}
    )
    lengths = [len(row.tokens) for row in rows]
    _, padded = noised(job, torch.zeros(2, max(lengths), dtype=torch.long))
    _, joined = noised(job, torch.zeros(1, sum(lengths) + 3, dtype=torch.long))
    unpadded = [noise[:length] for noise, length in zip(padded, lengths, strict=True)]
    assert torch.allclose(joined[0, : sum(lengths)], torch.cat(unpadded), atol=1e-6)


def test_each_rank_gives_its_rows_the_same_noise_as_one_process(tmp_path: Path) -> None:
    data = runs.make_data(tmp_path / "data", runs.documents(4), batch=4, steps=1)
    values, tokens = {"neftune_alpha": ALPHA}, torch.zeros(4, 30, dtype=torch.long)
    single_process = runs.make_job(tmp_path, tmp_path, data, steps=1, world=1, micro=4, settings=values)
    parts = runs.make_job(tmp_path, tmp_path, data, steps=1, world=2, micro=2, settings=values)
    _, expected = noised(single_process, tokens)
    for rank in (0, 1):
        env = RankEnv(rank=rank, local_rank=rank, world_size=2, local_world_size=2, node=0)
        _, noise = noised(parts, tokens[:2], env=env)
        torch.testing.assert_close(noise, expected[rank::2], rtol=0, atol=1e-6)


def test_no_noise_is_added_outside_training(tmp_path: Path) -> None:
    tokens = torch.arange(6)[None]
    embedding, _ = noised(job_of(tmp_path, runs.documents(3)), tokens)
    plain = torch.nn.functional.embedding(tokens, embedding.weight)
    with torch.no_grad():
        assert torch.equal(embedding(tokens), plain)
    assert torch.equal(embedding.eval()(tokens), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "alone", "together"),
    [
        ("deepspeed", "zero0", "zero2"),
        pytest.param("fsdp2", "none", "fsdp", marks=pytest.mark.nightly),
        pytest.param("torchtune", "none", "fsdp", marks=pytest.mark.nightly),
    ],
)
def test_the_noise_of_a_run_is_the_same_on_two_processes_and_after_a_checkpoint(
    tmp_path: Path, engine: str, alone: str, together: str
) -> None:
    if engine == "torchtune":
        require_torchtune()
    model = runs.make_model(tmp_path / "model")
    data = runs.make_data(tmp_path / "data", runs.documents(12), batch=BATCH, steps=STEPS)
    options: dict[str, Any] = {"steps": STEPS, "engine": engine}
    run_options = {"settings": {"neftune_alpha": ALPHA}}
    one = runs.make_job(
        tmp_path / "one",
        model,
        data,
        world=1,
        micro=4,
        sharding=alone,
        checkpoint_every=1,
        **options,
        **run_options,
    )
    two = runs.make_job(
        tmp_path / "two",
        model,
        data,
        world=2,
        micro=1,
        accumulation=2,
        sharding=together,
        **options,
        **run_options,
    )
    plain = runs.make_job(tmp_path / "plain", model, data, world=1, micro=4, sharding=alone, **options)
    losses = runs.losses(runs.run(one))
    assert runs.losses(runs.run(two)) == pytest.approx(losses, rel=2e-5)
    assert runs.losses(runs.run(runs.resumed(one, tmp_path / "resumed", 2))) == losses[2:]
    assert abs(runs.losses(runs.run(plain))[0] - losses[0]) > 1e-3
