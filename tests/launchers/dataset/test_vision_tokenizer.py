"""Texts with image tokens and inputs of vision-language models, compared with transformers processors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

import torch  # noqa: E402

from estimator.errors import UserError  # noqa: E402
from launchers.dataset.batches import collate  # noqa: E402
from launchers.dataset.prepared import IGNORE, Row  # noqa: E402
from launchers.dataset.render import load_tokenizer, tokenize  # noqa: E402
from launchers.dataset.rows import Conversation, parse  # noqa: E402
from launchers.dataset.turns import IMAGE, Message  # noqa: E402
from launchers.models import causal  # noqa: E402
from launchers.settings import build  # noqa: E402
from tests import vision_models  # noqa: E402


def noise(width: int, height: int, seed: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


TALL, WIDE = noise(30, 80, 0), noise(56, 40, 1)


def chat(content: str, answer: str, *images: bytes) -> Conversation:
    messages = (Message(role="user", content=content), Message(role="assistant", content=answer))
    return Conversation(messages=messages, images=images, line=3)


TWO = chat(f"Is {IMAGE} like {IMAGE}?", "No.", TALL, WIDE)
ONE = chat(f"{IMAGE}What?", "Noise.", WIDE)
NONE = parse({"prompt": "Hi", "response": "Hello"})


FIRST, *OTHERS = vision_models.FAMILIES


@pytest.fixture(
    scope="module", params=[FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.make(tmp_path_factory.mktemp("vision") / request.param, request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(folder, build({"vision": "frozen"}))


def rows_of(tokenizer: Any, *conversations: Conversation) -> list[Row]:
    encoded = zip(tokenize(conversations, tokenizer), conversations, strict=True)
    return [
        Row(
            tokens=ids,
            labels=np.where(counted, ids, IGNORE),
            lengths=np.array([len(ids)], dtype=np.int32),
            images=[np.frombuffer(image, dtype=np.uint8) for image in row.images],
        )
        for (ids, counted), row in encoded
    ]


def test_tokens_and_inputs_equal_those_of_the_transformers_processor(tokenizer: Any) -> None:
    place = {"type": "image"}
    content = [{"type": "text", "text": "Is "}, place, {"type": "text", "text": " like "}, place]
    messages = [
        {"role": "user", "content": [*content, {"type": "text", "text": "?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]},
    ]
    processor = tokenizer.processor
    text = processor.apply_chat_template(messages)
    pictures = [Image.open(io.BytesIO(image)).convert("RGB") for image in (TALL, WIDE)]
    expected = processor(text=[text], images=[pictures], return_tensors="pt", add_special_tokens=False)
    (row,) = rows_of(tokenizer, TWO)
    batch = collate([row], 0, images=tokenizer)
    del expected["attention_mask"]
    assert batch.inputs.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(batch.inputs[name]), value), name
    assert tokenizer.decode(row.tokens[row.labels != IGNORE]) == "No.<|eot_id|>"


def test_image_tokens_never_count_even_if_prompts_do(tokenizer: Any) -> None:
    ((ids, counted),) = tokenize([ONE], tokenizer, train_on_prompt=True)
    images = np.isin(ids, tokenizer.image_ids)
    assert images.sum() >= vision_models.TOKENS
    assert not counted[images].any()
    assert "What?" in tokenizer.decode(ids[counted])


def test_each_row_of_a_batch_has_the_same_logits_as_alone(folder: Path, tokenizer: Any) -> None:
    model = causal.load(folder).eval()
    rows = rows_of(tokenizer, TWO, NONE, ONE)
    with torch.no_grad():
        together = model(**collate(rows, 0, images=tokenizer).inputs).logits
        for row, logits in zip(rows, together, strict=True):
            alone = model(**collate([row], 0, images=tokenizer).inputs).logits[0]
            torch.testing.assert_close(logits[: len(row.tokens)], alone, atol=1e-5, rtol=0)


def test_a_template_without_a_place_for_the_image_is_refused_with_the_line(folder: Path) -> None:
    template = "{% for m in messages %}{{ m['content'][-1]['text'] }}<|eot_id|>{% endfor %}"
    tokenizer = load_tokenizer(folder, build({"vision": "frozen", "chat_template": template}))
    with pytest.raises(UserError, match=r"line 3: .*the chat template renders 0 of 1 images"):
        list(tokenize([ONE], tokenizer))


def test_a_folder_without_an_image_processor_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        if path.suffix == ".json" and "processor" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "chat_template.jinja").write_bytes((folder / "chat_template.jinja").read_bytes())
    with pytest.raises(UserError, match=r"The image processor in .* cannot be loaded"):
        list(tokenize([ONE], load_tokenizer(tmp_path, build({"vision": "frozen"}))))
