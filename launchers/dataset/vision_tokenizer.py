"""Image processing of vision-language models: text with image tokens, and image tensors.

transformers' processors also read videos, which requires torchvision. Here they are built for images only,
and work with Pillow if torchvision is not installed.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estimator.errors import UserError
from launchers.base.imports import imported_quietly
from launchers.dataset.turns import IMAGE

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

# Processors that need another package, and classes that process images in the same way without it
_SAME_IMAGES = {"SmolVLMProcessor": "Idefics3Processor"}
_TYPES = ("mm_token_type_ids", "token_type_ids")  # names of the model input that marks image tokens


def load_processor(folder: Path, tokenizer: Any) -> Any:
    """Load the image processor of a model folder, combined with a tokenizer; raises UserError."""
    with imported_quietly():
        import transformers
        from transformers import AutoImageProcessor, ProcessorMixin
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        name = PROCESSOR_MAPPING_NAMES[config.model_type]
        if isinstance(name, tuple):
            name = next(option for option in name if option is not None)
        kind = getattr(transformers, _SAME_IMAGES.get(name, name))
        values, _ = ProcessorMixin.get_processor_dict(folder)
        images = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        options = {key: values[key] for key in ("image_seq_len", "image_seq_length") if key in values}
        options["chat_template"] = tokenizer.chat_template
        parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": None}
        return _without_video(kind)(**{key: parts[key] for key in kind.get_attributes()}, **options)
    except Exception as error:  # noqa: BLE001 - untrusted files, read by code of each model family
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"The image processor in {folder} cannot be loaded: {reason}",
            "Use the processor's files that were published with the weights.",
        ) from None


def _without_video(kind: Any) -> Any:
    """Derive a processor class that does not require a video processor."""

    class ForImages(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    ForImages.__name__ = ForImages.__qualname__ = kind.__name__
    return ForImages


class VisionTokenizer:
    """Tokenizer of a vision-language model: also renders turns with images and inserts image tokens.

    All other attributes and calls are delegated to the text tokenizer.
    """

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer, self._folder = tokenizer, folder

    @cached_property
    def processor(self) -> Any:
        """Processor of the model."""
        return load_processor(self._folder, self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._tokenizer(*args, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        """Render a chat, with images as :data:`launchers.dataset.turns.IMAGE` in the contents."""
        return self._tokenizer.apply_chat_template(to_content_parts(messages), **options)

    def expand_images(self, images: Sequence[bytes], text: str, cuts: Sequence[int]) -> tuple[str, list[int]]:
        """Insert image tokens into a rendered text; return the text, and ``cuts`` as positions in it.

        Raises ValueError if the text does not have a placeholder for each image.
        """
        _, replacements = self.processor._process_images([decode_images(images)], **self._image_options)
        (expanded_text,), (offsets,) = self.processor.get_text_with_replacements([text], replacements)
        if len(offsets) != len(images):
            raise ValueError(f"the chat template renders {len(offsets)} of {len(images)} images")
        positions = []
        for cut in cuts:
            earlier = [offset for offset in offsets if offset["span"][1] <= cut]
            positions.append(
                cut + sum(len(offset["replacement"]) - len(offset["text"]) for offset in earlier)
            )
        return expanded_text, positions

    @cached_property
    def _image_options(self) -> dict[str, Any]:
        merged = self.processor._merge_kwargs(tokenizer_init_kwargs=self._tokenizer.init_kwargs)
        options: dict[str, Any] = merged["images_kwargs"]
        return options

    @cached_property
    def image_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that represent parts of an image; they are never prediction targets."""
        return tuple(token for token in self.processor.image_token_ids if token is not None)

    def inputs(self, images: Sequence[Sequence[bytes]], input_ids: torch.Tensor) -> dict[str, Any]:
        """Return the model's other inputs for a batch: pixels, their geometry, and types of the tokens.

        ``images``: encoded images of each row. ``input_ids``: [rows, longest row].
        """
        import torch

        inputs: dict[str, Any] = {}
        if any(images):
            opened_rows = [decode_images(row) for row in images]
            options = {**self._image_options, "return_tensors": "pt"}
            processed = self.processor.image_processor(opened_rows, **options)
            unused = {*self.processor.unused_input_names, "rows", "cols"}
            inputs = {name: value for name, value in processed.items() if name not in unused}
        types = next((name for name in _TYPES if name in self.processor.model_input_names), None)
        if types is not None:
            marks = torch.isin(input_ids, torch.tensor(self.image_ids))
            inputs[types] = marks.to(input_ids.dtype)
        return inputs


def to_content_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert contents with :data:`launchers.dataset.turns.IMAGE` to lists of text and image parts."""
    return [{**message, "content": _content_parts(message["content"])} for message in messages]


def _content_parts(content: str) -> list[dict[str, str]]:
    """Split a content at its image placeholders."""
    texts = content.split(IMAGE)
    parts: list[dict[str, str]] = []
    for number, text in enumerate(texts):
        if number:
            parts.append({"type": "image"})
        if text or not parts:
            parts.append({"type": "text", "text": text})
    return parts


def decode_images(images: Sequence[bytes]) -> list[Image]:
    """Decode image files to RGB images."""
    from PIL import Image

    decoded = []
    for data in images:
        with Image.open(io.BytesIO(bytes(data))) as image:
            decoded.append(image.convert("RGB"))
    return decoded
