"""A model that makes images, trained by the flow on two pods of a real API server's."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.dataset import drawn_shapes
from tests.kubernetes.cluster import Cluster
from tests.kubernetes.test_on_a_control_plane import LIMIT_S

pytest.importorskip("diffusers")
pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1500)]

STEPS = 8


def test_tiny_sdxl_trains_over_two_pods(cluster: Cluster, tmp_path: Path) -> None:
    shapes = drawn_shapes.write(tmp_path / "shapes", 160)
    launched = cluster.launch(
        "finetune_flow",
        tmp_path,
        *("run", "--with", "kubernetes", "--device=cpu", "--nodes=2", "--model=tiny-sdxl", "--method=lora"),
        *(f"--dataset={shapes}", f"--max-steps={STEPS}", "--global-batch-size=8", "--epochs=3"),
        *("--set=evaluation.every_steps=4", "--set=evaluation.generations=1"),
    )
    assert launched.wait(LIMIT_S) == 0, launched.story()
    found = launched.artifacts("FinetuneFlow")
    assert (found["plan"].target, found["plan"].request.nodes) == ("kubernetes", 2)
    losses = [metrics["loss"] for metrics in found["metrics"]]
    assert len(losses) == STEPS
    assert [each.step for each in found["outcome"].evaluations] == [4, STEPS]
    evaluation = found["evaluation"]
    assert evaluation.finetuned.loss < evaluation.base.loss
    (pictures,) = evaluation.pictures
    assert pictures.base != pictures.finetuned
    pods = [pod for pod in cluster.hub.pods if "-0-0.js-" in pod.spec.hostname]
    assert len({pod.spec.environment["NODE_NAME"] for pod in pods}) == 2
    assert "latents: " in launched.log
    launched.nothing_left()
