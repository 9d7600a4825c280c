"""Evaluation of the base and the finished model: held-out loss, and exact match of greedy answers.

It runs in a separate process (``python -m launchers.evaluation.evaluate request.json``), which frees its
memory at its end and whose crash fails only the evaluation. The finished model is loaded from its exported
folder, so a result also proves that the export can be loaded.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from estimator.errors import UserError
from estimator.formatting import format_clock
from estimator.terminal import print
from estimator.vocabulary import IMAGE_TASK, TASKS
from launchers.base.imports import collector_paused, import_transformers
from launchers.base.request_process import read_request, write_request
from launchers.cluster.processes import PARENT, die_with_parent, started, tail
from launchers.dataset.measured import MAX_BATCH_TOKENS, MAX_ROWS
from launchers.dataset.turns import IMAGE
from launchers.evaluation.held_out import SAMPLED_TOKENS, Score, scorer_of
from launchers.evaluation.image_evaluation import measure
from launchers.evaluation.loading import load_model, precision_on
from launchers.evaluation.result import Answer, EvaluationResult
from launchers.run_config import RunConfig

PROGRESS_INTERVAL_S = 15.0  # maximum time between two progress lines
# Maximum tokens of a generation batch by device, including padding and answers. On GPUs its KV cache takes
# less memory than the logits of a batch for the held-out loss.
GENERATION_TOKENS = {"cuda": MAX_BATCH_TOKENS["cuda"], "cpu": SAMPLED_TOKENS["cpu"]}
_POLL_S = 0.1
STAGE = "stage"  # file in the work folder that names the model under evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRequest:
    """Input of one evaluation, saved as JSON for the evaluation process.

    ``data_dir`` is a prepared folder: the loss is computed on its heldout/, the prompts come from
    heldout.jsonl.
    """

    base_dir: Path
    model_dir: Path  # the finished model, or an unmerged adapter of the base
    data_dir: Path
    work_dir: Path  # receives request.json, result.json and evaluate.log
    settings: RunConfig  # the task selects the metrics
    generations: int = 3
    max_new_tokens: int = 64
    max_rows: int = MAX_ROWS  # maximum number of held-out rows to score
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: GPUs if available
    precision: Literal["auto", "bf16", "fp32"] = "auto"  # auto: bf16 on GPUs, fp32 on CPUs
    timeout_s: float = 3600.0
    reward: str | None = None  # reward function or model, as a path on this machine (TrainJob.reward)

    def __post_init__(self) -> None:
        for name in ("generations", "max_new_tokens", "max_rows"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be below 0")


def evaluate(request: EvaluationRequest) -> EvaluationResult:
    """Run the evaluation in a child process and return its result.

    Raises UserError if the evaluation fails or exceeds ``timeout_s``.
    """
    path = write_request(request.work_dir / "request.json", request)
    log, result = request.work_dir / "evaluate.log", request.work_dir / "result.json"
    result.unlink(missing_ok=True)
    (request.work_dir / STAGE).unlink(missing_ok=True)
    with started("launchers.evaluation.evaluate", path, log, on_cpu=request.device == "cpu") as process:
        status = _wait(process, request)
    if status != 0 or not result.is_file():
        reason = tail(log, 1) or f"exit status {status}"
        raise UserError(
            f"The evaluation of {request.model_dir} failed: {reason}", f"Its log: {tail(log, 30)}"
        )
    return EvaluationResult.from_dict(json.loads(result.read_text()))


def _wait(process: subprocess.Popen[bytes], request: EvaluationRequest) -> int:
    """Wait for the process and return its exit status; print a line per model, and every few seconds.

    Raises UserError after ``timeout_s``.
    """
    stage, start = request.work_dir / STAGE, time.monotonic()
    printed, printed_at = "", start
    while (status := process.poll()) is None:
        now = time.monotonic()
        if now - start > request.timeout_s:
            raise UserError(
                f"The evaluation did not end within {request.timeout_s:g} s.",
                "Hold out fewer rows (evaluation.fraction), or lower evaluation.generations.",
            )
        progress = (stage.read_text() if stage.is_file() else "") or "loading"
        if progress != printed or now - printed_at >= PROGRESS_INTERVAL_S:
            print(f"evaluating: {progress}, {format_clock(now - start)} elapsed", flush=True)
            printed, printed_at = progress, now
        time.sleep(_POLL_S)
    return status


def main() -> None:
    """Entry point of the evaluation process."""
    if PARENT in os.environ:
        die_with_parent(int(os.environ[PARENT]))
    request = read_request(EvaluationRequest, Path(sys.argv[1]))
    result = _evaluate(request)
    temporary = request.work_dir / "result.tmp"
    temporary.write_text(json.dumps(result.to_dict(), indent=1))
    temporary.rename(request.work_dir / "result.json")


def _evaluate(request: EvaluationRequest) -> EvaluationResult:
    """Score both models and generate their answers, in this process."""
    with collector_paused():
        import torch

    from launchers.dataset.prepared import Prepared
    from launchers.dataset.render import load_tokenizer

    device = request.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    precision = precision_on(device) if request.precision == "auto" else request.precision
    if TASKS[request.settings.task].images:
        return _evaluate_images(request, device)
    held_out = request.data_dir / "heldout"
    data = Prepared(held_out) if (held_out / "info.json").is_file() else None
    count = 0 if request.settings.task == "reward" else request.generations  # a reward model outputs scores
    prompts = _prompts(request.data_dir / "heldout.jsonl", count)
    import_transformers()
    # both models use the finished model's tokenizer, because the base may have none
    tokenizer = load_tokenizer(request.model_dir, request.settings) if prompts else None
    outcomes: list[tuple[Score | None, list[str]]] = []
    scorer = None
    if data is not None:
        scorer = scorer_of(
            request.settings,
            data,
            request.max_rows,
            tokenizer_dir=request.model_dir,
            reward=request.reward,
        )
    for name, folder in (("the base model", request.base_dir), ("the finished model", request.model_dir)):
        (request.work_dir / STAGE).write_text(name)
        model = load_model(
            folder,
            request.base_dir,
            device,
            precision,
            request.settings,
            trust_remote_code=request.settings.trust_remote_code,
        )
        answers = [] if not prompts else _generate_answers(model, tokenizer, prompts, request.max_new_tokens)
        outcomes.append((None if scorer is None else scorer.score(model), answers))
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    (base, base_answers), (finetuned, finetuned_answers) = outcomes
    return EvaluationResult(
        task=request.settings.task,
        base=base,
        finetuned=finetuned,
        answers=tuple(map(_answer, prompts, base_answers, finetuned_answers)),
        calibration=() if scorer is None else scorer.calibration,
        device=device,
        precision=precision,
    )


def _evaluate_images(request: EvaluationRequest, device: str) -> EvaluationResult:
    """Score both pipelines and generate their images, in this process."""
    from launchers.images.prepared import PreparedImages

    held_out = request.data_dir / "heldout"
    data = PreparedImages(held_out) if (held_out / "info.json").is_file() else None
    base, finetuned, pictures = measure(
        request.base_dir,
        request.model_dir,
        data,
        rows=request.max_rows,
        captions=request.generations,
        device=device,
        clip_model=request.settings.images.clip_model,
        on_stage=(request.work_dir / STAGE).write_text,
    )
    return EvaluationResult(
        task=IMAGE_TASK,
        base=base,
        finetuned=finetuned,
        pictures=pictures,
        device=device,
        precision=precision_on(device),
    )


def _prompts(path: Path, count: int) -> list[dict[str, Any]]:
    """Read the first ``count`` rows of heldout.jsonl; empty if there is no such file."""
    if not count or not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(count), strict=False)]


def _answer(prompt: dict[str, Any], base: str, finetuned: str) -> Answer:
    """Combine a row of heldout.jsonl with the answers of both models."""
    return Answer(
        prompt=prompt["prompt"],
        reference=prompt["reference"],
        base=base,
        finetuned=finetuned,
        question=_question(prompt),
        images=tuple(prompt.get("images", ())),
    )


def _question(prompt: dict[str, Any]) -> str:
    """Return the text of the last turn of a row of heldout.jsonl; empty for plain text."""
    messages = prompt.get("messages") or [{}]
    content = messages[-1].get("content")
    return content.replace(IMAGE, "") if isinstance(content, str) else ""


def _generate_answers(
    model: Any, tokenizer: Any, prompts: list[dict[str, Any]], max_new_tokens: int
) -> list[str]:
    """Generate greedy answers to the prompts, in batches by length; prompts with images one by one."""
    from launchers.dataset.render import pad_id_of

    pad = pad_id_of(tokenizer)
    config = model.config.get_text_config()
    max_prompt = max(1, getattr(config, "max_position_embeddings", 2**31) - max_new_tokens)
    answers: dict[int, str] = {}
    encoded: list[list[int]] = []
    for index, prompt in enumerate(prompts):
        text = prompt["prompt"]
        images = [base64.b64decode(image) for image in prompt.get("images", ())]
        if images:
            text, _ = tokenizer.expand_images(images, text, [])
        encoded.append(tokenizer(text, add_special_tokens=False).input_ids[-max_prompt:])
        if images:
            output = _generate(model, encoded[-1:], max_new_tokens, pad, partial(tokenizer.inputs, [images]))
            answers[index] = tokenizer.decode(output[0], skip_special_tokens=True)
    remaining = sorted(
        (index for index in range(len(encoded)) if index not in answers),
        key=lambda index: -len(encoded[index]),
    )
    while remaining:
        width = len(encoded[remaining[0]]) + max_new_tokens
        count = max(1, GENERATION_TOKENS[model.device.type] // width)
        batch, remaining = remaining[:count], remaining[count:]
        output = _generate(model, [encoded[index] for index in batch], max_new_tokens, pad)
        answers |= zip(batch, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True)
    return [answers[index] for index in range(len(encoded))]


def _generate(
    model: Any,
    prompts: list[list[int]],
    max_new_tokens: int,
    pad: int,
    extra_inputs: Callable[[Any], dict[str, Any]] = lambda _: {},
) -> list[list[int]]:
    """Generate tokens greedily after each prompt, padded at the end.

    ``extra_inputs``: builds the model's inputs other than the token ids.
    """
    import torch

    width = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        output = model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            **{name: value.to(model.device) for name, value in extra_inputs(tokens).items()},
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            pad_token_id=pad,
        )
    generated: list[list[int]] = output[:, width:].tolist()
    return generated


if __name__ == "__main__":
    main()
