"""The evaluation section of a card."""

from __future__ import annotations

from decorators.card.blocks import Chart, Grid, Picture
from decorators.card.evaluation import evaluation_blocks
from launchers.evaluation.held_out import CalibrationBin, Score, calibrate
from launchers.evaluation.image_evaluation import Pictures
from launchers.evaluation.result import Answer, EvaluationResult


def grids(result: EvaluationResult) -> list[Grid]:
    return [block for block in evaluation_blocks(result) if isinstance(block, Grid)]


def test_losses_perplexities_and_answers_of_both_models_are_side_by_side() -> None:
    result = EvaluationResult(
        base=Score(loss=2.0, labels=50, rows=7),
        finetuned=Score(loss=1.0, labels=50, rows=7),
        answers=(Answer(prompt="p" * 1000, reference="r <|eot_id|>", base="", finetuned="f"),),
    )
    figures, answers = grids(result)
    assert figures.rows == (
        ("held-out loss", "2.0000", "1.0000"),
        ("perplexity", "7.389", "2.718"),
        ("held-out answers right (exact match)", "0 of 1", "0 of 1"),
        ("held-out rows", "7", "7"),
    )
    (_, prompt), *cells = answers.rows
    assert cells == [("expected", "r"), ("before", "(nothing)"), ("after", "f")]
    assert prompt.replace("\N{ZERO WIDTH SPACE}", "") == "p" * 400 + "..."
    assert max(map(len, prompt.split("\N{ZERO WIDTH SPACE}"))) <= 24 + len("...")


def test_a_card_counts_all_answers_and_shows_a_few() -> None:
    answers = tuple(
        Answer(prompt="<|x|>p", reference="yes", base="no", finetuned="yes", question=f"question {number}")
        for number in range(20)
    )
    result = EvaluationResult(base=None, finetuned=Score(loss=1.0, labels=5, rows=20), answers=answers)
    figures, *shown = grids(result)
    assert ("held-out answers right (exact match)", "0 of 20", "20 of 20") in figures.rows
    assert [grid.rows[0] for grid in shown] == [("message", f"question {number}") for number in range(3)]


def test_the_metrics_of_a_task_on_pairs_are_shown() -> None:
    metrics = {"reward_margin": 0.5, "accuracy": 0.75}
    result = EvaluationResult(
        task="dpo",
        base=Score(loss=0.6931, labels=50, rows=8, metrics={"reward_margin": 0.0, "accuracy": 0.5}),
        finetuned=Score(loss=0.5, labels=50, rows=8, metrics=metrics),
    )
    (figures,) = grids(result)
    assert ("pairs ranked correctly", "50.0%", "75.0%") in figures.rows
    assert ("reward margin", "0.0000", "0.5000") in figures.rows
    assert ("held-out pairs", "8", "8") in figures.rows


def test_the_calibration_of_a_reward_model_is_drawn() -> None:
    bins = calibrate([4.0, 4.2, -4.1, 0.0, 0.1])
    result = EvaluationResult(
        task="reward", base=None, finetuned=Score(loss=0.5, labels=5, rows=5), calibration=bins
    )
    (chart,) = [block for block in evaluation_blocks(result) if isinstance(block, Chart)]
    assert chart.spec["layer"][1]["data"]["values"][0] == {
        "sure": bins[0].confidence,
        "right": 0.75,
        "pairs": 2,
    }
    assert EvaluationResult.from_dict(result.to_dict()) == result
    assert isinstance(bins[0], CalibrationBin)


def test_images_of_both_models_are_shown_next_to_their_caption() -> None:
    result = EvaluationResult(
        task="text-to-image",
        base=Score(loss=1.0, labels=0, rows=3, metrics={"loss at least noise": 1.0}),
        finetuned=Score(loss=0.5, labels=0, rows=3, metrics={"loss at least noise": 0.5}),
        pictures=(Pictures(prompt="a red circle", base="AA==", finetuned="AQ=="),),
    )
    figures, pictures = grids(result)
    assert ("held-out images", "3", "3") in figures.rows
    ((caption, before, after),) = pictures.rows
    assert caption == "a red circle"
    assert (before, after) == (Picture(png="AA==", label="before"), Picture(png="AQ==", label="after"))
    assert EvaluationResult.from_dict(result.to_dict()) == result
    assert "3 images" in result.text()
