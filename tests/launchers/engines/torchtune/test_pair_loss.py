"""DPO by torchtune recipes: loss, order of pairs, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from estimator import models
from launchers.dataset.prepared import Prepared
from launchers.settings import Settings
from tests.launchers.engines.loop import runs
from tests.optional import require_torchtune

torch = pytest.importorskip("torch")
require_torchtune()

from launchers.engines.loop.preference_losses import Answers, dpo_rewards, sigmoid_loss  # noqa: E402
from launchers.engines.torchtune.pair_loss import PairLoss  # noqa: E402
from launchers.engines.torchtune.parts import PadOnly, PreparedPairs  # noqa: E402
from launchers.run.job import unsupported  # noqa: E402


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_pair_loss_equals_the_dpo_loss_of_the_loop_engine_and_is_accumulated(smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(4, 6, generator=generator)
    loss = PairLoss(beta=0.3, label_smoothing=smoothing)
    losses, chosen, _ = loss(*drawn[:, :2])
    assert loss(*drawn[:, 2:])[0].shape == (4,)
    count = torch.ones(6)
    policy, reference = (
        Answers(chosen=one, rejected=other, chosen_tokens=count, rejected_tokens=count)
        for one, other in (drawn[:2], drawn[2:])
    )
    rewards = dpo_rewards(policy, reference, 0.3)
    expected = sigmoid_loss(rewards, label_smoothing=smoothing)
    assert torch.allclose(losses, expected[:2])
    assert torch.allclose(chosen, rewards.chosen[:2])

    pairs, summed, *metrics = loss.take_sums().tolist()
    assert pairs == 6
    assert summed == pytest.approx(expected.sum().item(), rel=1e-5)
    sums = {name: value.item() for name, value in rewards.sums().items()}
    assert dict(zip(loss.metrics, metrics, strict=True)) == pytest.approx(sums, rel=1e-4)
    assert loss.take_sums().tolist() == [0.0] * 6


def test_pairs_are_read_in_training_order(tmp_path: Path) -> None:
    runs.make_data(tmp_path, runs.pairs(6), batch=2, steps=3)
    pairs = PreparedPairs(PadOnly(0), folder=str(tmp_path), start_step=1, total_steps=3, packed=False)
    data = Prepared(tmp_path)
    assert len(pairs) == 4
    row = data.row(int(data.order[2]))
    chosen, rejected = row.documents()
    assert pairs[0]["chosen_input_ids"].tolist() == chosen.tokens.tolist()
    assert (pairs[0]["rejected_labels"].tolist(), pairs.take_counts()[0]) == (rejected.labels.tolist(), 2)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"method": "lora"}, None),
        ({"method": "qlora"}, None),
        ({"method": "full"}, "keeps a second model in memory"),
        ({"method": "lora", "packing": True}, "packing"),
        ({"method": "lora", "task": "orpo"}, "no preference loss except DPO's"),
    ],
)
def test_torchtune_learns_dpo_with_adapters(values: dict[str, object], word: str | None) -> None:
    refusal = unsupported(
        "torchtune", Settings.model_validate({"task": "dpo"} | values), models.find("llama-8b")
    )
    assert (refusal is None) == (word is None)
    assert (word or "") in (refusal or "")


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.05, pytest.param(None, marks=pytest.mark.nightly)])
def test_gradients_are_clipped_and_measured_equally_on_one_process_and_two(
    tmp_path: Path, clip: float | None
) -> None:
    from launchers.models import tiny_llama

    tiny_llama.make(tmp_path / "model")
    runs.make_data(tmp_path / "data", runs.pairs(12), batch=4, steps=4)
    losses = []
    for world in (1, 2):
        job = runs.make_job(
            tmp_path / str(world),
            tmp_path / "model",
            tmp_path / "data",
            steps=4,
            engine="torchtune",
            world=world,
            accumulation=2 // world,
            sharding="fsdp" if world > 1 else "none",
            settings={"task": "dpo", "method": "lora", "clip_grad_norm": clip, "optimizer": {"lr": 1e-2}},
        )
        losses.append(runs.run(job))
    one, two = losses
    assert [step.loss for step in one] == pytest.approx([step.loss for step in two], rel=1e-5)
    assert [step.grad_norm for step in one] == pytest.approx([step.grad_norm for step in two], rel=1e-4)
    assert all(step.grad_norm and step.grad_norm > 0.05 for step in one), "before it is clipped"
    assert one[-1].metrics is not None
    assert one[-1].metrics == pytest.approx(two[-1].metrics, rel=1e-4)
