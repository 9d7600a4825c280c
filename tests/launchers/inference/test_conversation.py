"""Conversations give the answers of generate in transformers, with and without an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from estimator.errors import UserError
from launchers.inference import finished
from launchers.inference.conversation import (
    Conversation,
    LoadedModel,
    Sampling,
    load_base,
    load_finetuned,
    read_image,
)
from tests import vision_models

GREEDY = Sampling(max_new_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def loaded(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_finetuned(finished.from_folder(model_dir), "cpu", tmp_path_factory.mktemp("work"))


def generated(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return the greedy answer as generated in the documentation of transformers."""
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_greedy_answers_of_two_turns_equal_those_of_generate(loaded: LoadedModel) -> None:
    conversation = Conversation(loaded=loaded, sampling=GREEDY, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for question in ("What is a router?", "And a kettle?"):
        pieces: list[str] = []
        reply = conversation.ask(question, pieces.append)
        messages.append({"role": "user", "content": question})
        expected = generated(loaded.model, loaded.tokenizer, messages)
        assert expected
        assert (reply.text, "".join(pieces)) == (expected, expected)
        messages.append({"role": "assistant", "content": expected})
    conversation.reset()
    assert conversation.ask("What is a router?").text == generated(
        loaded.model, loaded.tokenizer, messages[:2]
    )


def test_an_adapter_changes_answers_and_its_disabled_adapter_answers_like_the_base(
    adapter_dir: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    model = finished.from_folder(adapter_dir)
    adapted = load_finetuned(model, "cpu", tmp_path)
    base = load_base(adapted, model, "cpu")
    assert base.model is adapted.model
    answers = [
        Conversation(loaded=each, sampling=GREEDY).ask("Hello").text for each in (adapted, base, loaded)
    ]
    assert answers[0] != answers[1] == answers[2]


def test_the_same_seed_gives_the_same_answer_and_another_seed_a_different_one(loaded: LoadedModel) -> None:
    def drawn(seed: int) -> str:
        sampling = Sampling(max_new_tokens=12, temperature=1.5, seed=seed)
        return Conversation(loaded=loaded, sampling=sampling).ask("Hello").text

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_conversation_longer_than_the_context_loses_its_oldest_turns(loaded: LoadedModel) -> None:
    longest = loaded.max_tokens
    assert longest is not None
    sampling = Sampling(max_new_tokens=longest - 60, temperature=0)
    conversation = Conversation(loaded=loaded, sampling=sampling)
    conversation.messages = [
        {"role": role, "content": "word " * 20} for role in ("user", "assistant", "user", "assistant")
    ]
    tokens, dropped = conversation._encode([*conversation.messages, {"role": "user", "content": "Hello"}])
    assert dropped == 4
    assert loaded.tokenizer.decode(tokens).count("word") == 0
    exact = [{"role": "user", "content": "Hello"}]
    conversation.sampling = Sampling(max_new_tokens=longest - len(tokens), temperature=0)
    assert conversation._encode(exact) == (tokens, 0)
    conversation.sampling = sampling
    with pytest.raises(UserError, match="takes at most 60"):
        conversation._encode([{"role": "user", "content": "word " * 100}])


def test_a_model_without_a_template_continues_the_text(loaded: LoadedModel) -> None:
    import copy

    plain = copy.copy(loaded)
    plain.tokenizer = copy.copy(loaded.tokenizer)
    plain.tokenizer.chat_template = None
    conversation = Conversation(loaded=plain, sampling=GREEDY)
    reply = conversation.ask("Once upon")
    ids = loaded.tokenizer("Once upon", return_tensors="pt").input_ids
    with torch.no_grad():
        output = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert reply.text == loaded.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert conversation.messages == []


@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_an_answer_about_an_image_equals_generate_and_a_text_model_refuses_images(
    family: str, loaded: LoadedModel, tmp_path: Path
) -> None:
    image = pytest.importorskip("PIL.Image")
    picture = image.new("RGB", (40, 40), (220, 20, 20))
    picture.save(tmp_path / "red.png")
    data = read_image(tmp_path / "red.png")
    with pytest.raises(UserError, match="sees no images"):
        Conversation(loaded=loaded, sampling=GREEDY).ask("What is it?", images=[data])
    folder = vision_models.make(tmp_path / family, family)
    seeing = load_finetuned(finished.from_folder(folder), "cpu", tmp_path / "work")
    assert seeing.vision is not None
    conversation = Conversation(loaded=seeing, sampling=GREEDY)
    parts: list[dict[str, Any]] = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    chat: list[dict[str, Any]] = [{"role": "user", "content": parts}]
    processor = seeing.vision.processor
    for question in ("What is it?", "And its color?"):
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        inputs = processor(text=[text], images=[[picture]], return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            output = seeing.model.generate(**inputs, max_new_tokens=12, do_sample=False)
        expected = processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        reply = conversation.ask(question, images=[data] if len(chat) == 1 else ())
        assert (reply.text, reply.prompt_tokens) == (expected, inputs["input_ids"].shape[1])
        for role, content in (("assistant", expected), ("user", "And its color?")):
            chat.append({"role": role, "content": [{"type": "text", "text": content}]})
