"""Conversations with a model in this process, with its chat template and streamed answers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from estimator.errors import UserError
from launchers.base.imports import imported_quietly
from launchers.base.tokenizer import tokenizer_in
from launchers.dataset import render
from launchers.dataset.files import BadRow
from launchers.dataset.turns import IMAGE
from launchers.dataset.vision_tokenizer import VisionTokenizer
from launchers.engines.new_tokens import with_new_tokens
from launchers.evaluation.loading import load_model, precision_on
from launchers.images.decoding import checked
from launchers.inference.finished import FinishedModel, fetch_cached
from launchers.models import causal

Message = dict[str, Any]  # keys role, content and images (encoded images that precede the content)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters; None: as in the model's generation_config.json."""

    max_new_tokens: int = 512
    temperature: float | None = None  # 0: the most likely token (greedy)
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of transformers' ``generate``."""
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens}
        if self.repetition_penalty is not None:
            options["repetition_penalty"] = self.repetition_penalty
        if self.temperature == 0:
            return options | {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        sampling = {name: value for name, value in sampling.items() if value is not None}
        return options | sampling | ({"do_sample": True} if sampling else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """One answer."""

    text: str
    tokens: int  # generated, end token included
    seconds: float
    prompt_tokens: int
    dropped: int = 0  # number of oldest messages that did not fit into the model's context


@dataclass(kw_only=True)
class LoadedModel:
    """Weights and tokenizer, ready to generate. ``without_adapter``: generate with the adapter disabled."""

    name: str
    model: Any
    tokenizer: Any
    vision: VisionTokenizer | None = None  # of a vision-language model
    without_adapter: bool = False

    @property
    def max_tokens(self) -> int | None:
        """Longest sequence, answer included; None if the configuration has none."""
        longest: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return longest

    @contextmanager
    def active(self) -> Iterator[Any]:
        """Yield the model to generate with."""
        import torch

        adapter_context = self.model.disable_adapter() if self.without_adapter else nullcontext()
        with torch.inference_mode(), adapter_context:
            yield self.model


def load_finetuned(finished: FinishedModel, device: str, work: Path) -> LoadedModel:
    """Load a model, or an adapter on its base. ``device``: cuda (over all GPUs) or cpu."""
    base = finished.folder
    if finished.is_adapter:
        vision = finished.settings is not None and finished.settings.vision is not None
        base = fetch_cached(finished.base_source(), vision=vision)
        if finished.settings is not None:
            base = with_new_tokens(base, finished.settings, work / "base")
    with _suppress_messages():
        model = load_model(finished.folder, base, device, precision_on(device), finished.settings)
    tokenizer = tokenizer_in(finished.folder)
    vision_tokenizer = VisionTokenizer(tokenizer, base) if causal.sees_images(model.config) else None
    return LoadedModel(name=finished.name, model=model, tokenizer=tokenizer, vision=vision_tokenizer)


def load_base(loaded: LoadedModel, finished: FinishedModel, device: str) -> LoadedModel:
    """Return the base model, with the tokenizer and chat template of the fine-tuned one.

    For a PEFT adapter nothing is loaded: its base is in memory already.
    """
    if hasattr(loaded.model, "disable_adapter"):
        return replace(loaded, name="base", without_adapter=True)
    folder = fetch_cached(finished.base_source(), vision=loaded.vision is not None)
    with _suppress_messages():
        model = load_model(folder, folder, device, precision_on(device))
    return LoadedModel(name="base", model=model, tokenizer=loaded.tokenizer, vision=loaded.vision)


def read_image(path: Path) -> bytes:
    """Read an image file for a message. Raises UserError if it is missing or not an image."""
    try:
        return checked(path.expanduser().read_bytes(), min_side=1).image
    except (OSError, BadRow) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"Image {path} cannot be read: {reason}.", "Give a PNG, JPEG or WebP file.") from None


@contextmanager
def _suppress_messages() -> Iterator[None]:
    """Suppress libraries' warnings and progress bars while a model is loaded."""
    with causal.without_progress_bars(), imported_quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers calls its own deprecated names
        yield


@dataclass(kw_only=True)
class Conversation:
    """The messages exchanged with one model."""

    loaded: LoadedModel
    sampling: Sampling
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template; without one it continues a text."""
        return bool(self.loaded.tokenizer.chat_template)

    def reset(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages.clear()

    def ask(
        self, text: str, on_text: Callable[[str], None] = lambda _: None, *, images: Sequence[bytes] = ()
    ) -> Reply:
        """Generate the answer to a message, and keep both for the next turn.

        ``on_text`` is called with each piece of the answer. A KeyboardInterrupt discards message and answer.
        Raises UserError for a message that exceeds the model's context, and for ``images`` (encoded files)
        if the model cannot process any.
        """
        if images:
            self.check_sees_images()
        message = {"role": "user", "content": text, "images": tuple(images)}
        messages = [*self.messages, message]
        tokens, dropped = self._encode(messages)
        start = time.monotonic()
        generated = self._generate(tokens, _images_of(messages[dropped:]), on_text)
        answer = self.loaded.tokenizer.decode(generated, skip_special_tokens=True)
        if self.chats:
            self.messages += [message, {"role": "assistant", "content": answer}]
        return Reply(
            text=answer,
            tokens=len(generated),
            seconds=time.monotonic() - start,
            prompt_tokens=len(tokens),
            dropped=dropped,
        )

    def check_sees_images(self) -> None:
        """Raise UserError for a model without a vision tower."""
        if self.loaded.vision is None or not self.chats:
            raise UserError(
                f"{self.loaded.name} sees no images.",
                "Use a vision-language model, trained on rows with images.",
            )

    def _encode(self, messages: list[Message]) -> tuple[list[int], int]:
        """Encode the newest messages that fit before an answer; also return the number of omitted ones."""
        longest = self.loaded.max_tokens
        max_prompt = None if longest is None else max(1, longest - self.sampling.max_new_tokens)
        dropped = 0
        while True:
            tokens = self._tokens(messages[dropped:])
            if max_prompt is None or len(tokens) <= max_prompt:
                return tokens, dropped
            if len(messages) - dropped <= 1:
                raise UserError(
                    f"The message has {len(tokens):,} tokens; with {self.sampling.max_new_tokens:,} for the "
                    f"answer, the model takes at most {max_prompt:,}.",
                    "Shorten it, or give --max-new-tokens a smaller number.",
                )
            dropped += 2  # a question and its answer

    def _tokens(self, messages: list[Message]) -> list[int]:
        tokenizer = self.loaded.tokenizer
        tokens: list[int]
        if not self.chats:
            tokens = tokenizer(messages[-1]["content"]).input_ids
            return tokens
        system = [{"role": "system", "content": self.system}] if self.system else []
        chat = [
            *system,
            *({"role": message["role"], "content": _with_image_marks(message)} for message in messages),
        ]
        vision, images = self.loaded.vision, _images_of(messages)
        template = tokenizer if vision is None else vision
        try:
            with render.template_limits():
                text = template.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            render.checked_length(text, chat)
            if vision is not None and images:
                text, _ = vision.expand_images(images, text, [])
        except Exception as error:  # noqa: BLE001 - a template is a program, which can fail in any way
            reason = render.one_line(error).removesuffix(".")
            raise UserError(
                f"The model's chat template refuses the conversation: {reason}.",
                "Use /reset, or another model.",
            ) from None
        tokens = tokenizer(text, add_special_tokens=False).input_ids  # the template adds them
        return tokens

    def _generate(
        self, tokens: list[int], images: Sequence[bytes], on_text: Callable[[str], None]
    ) -> list[int]:
        import torch
        from transformers import TextStreamer

        class Streamer(TextStreamer):  # type: ignore[misc]
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002
                on_text(text)

        tokenizer = self.loaded.tokenizer
        if self.sampling.seed is not None:
            torch.manual_seed(self.sampling.seed)
        with self.loaded.active() as model:
            ids = torch.tensor([tokens], device=model.device)
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **self._image_inputs(images, ids),
                streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
                pad_token_id=_pad_id(model, tokenizer),
                **self.sampling.arguments(),
            )
        generated: list[int] = output[0, len(tokens) :].tolist()
        return generated

    def _image_inputs(self, images: Sequence[bytes], ids: Any) -> dict[str, Any]:
        """Return the model's inputs for the images, on its device and in its precision."""
        if self.loaded.vision is None or not images:
            return {}
        model = self.loaded.model
        return {
            name: value.to(model.device, model.dtype if value.is_floating_point() else None)
            for name, value in self.loaded.vision.inputs([images], ids.cpu()).items()
        }


def _images_of(messages: Sequence[Message]) -> list[bytes]:
    return [image for message in messages for image in message.get("images", ())]


def _with_image_marks(message: Message) -> str:
    """Return a message's text, with a mark for each image before it."""
    text: str = message["content"].replace(IMAGE, "")
    return IMAGE * len(message.get("images", ())) + text


def _pad_id(model: Any, tokenizer: Any) -> int:
    """Return a padding token for ``generate``, which warns without one even if nothing is padded."""
    ids = (model.generation_config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in ids if token is not None), 0)
