"""Rendering of conversations to tokens with the chat template, and masks of tokens that count in the loss."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from estimator.errors import UserError
from estimator.models.architectures import family_of
from estimator.untrusted import read_json_object
from launchers.base.imports import import_transformers_without_torch
from launchers.base.tokenizer import tokenizer_in
from launchers.dataset.answer_spans import Messages, Span, has_marks, marked_spans, turn_span
from launchers.dataset.cpu_limit import cpu_limit, memory_limit
from launchers.dataset.rows import Conversation
from launchers.dataset.turns import IMAGE, Message
from launchers.dataset.vision_tokenizer import VisionTokenizer, to_content_parts
from launchers.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]  # ids of a row, and whether each counts in the loss

_BATCH = 1024  # conversations tokenized at a time
_PROMPT_CHARS = 200  # maximum length of a plain-text prompt
TEMPLATE_LIMIT_S = 10.0  # CPU time limit for rendering one chat, which usually takes less than a millisecond
TEMPLATE_LIMIT_BYTES = 2**29  # memory limit for rendering one chat
_MAX_EXPANSION = 20  # maximum ratio of a rendered chat's characters to the chat's
_ALWAYS_ALLOWED_CHARS = 2**20  # rendered characters that are allowed at any ratio
LONG_TEXT_CHARS = 2**20  # shorter texts are always tokenized completely, in about a second
_REFERENCE_CHARS = 2000  # maximum length of the reference for a plain-text prompt, the text that follows it

# Template for base models, whose tokenizers have none; section names of Stanford Alpaca
INSTRUCTION_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] | trim }}\n\n"
    "{% elif message['role'] == 'user' %}### Instruction:\n{{ message['content'] | trim }}\n\n### Response:\n"
    "{% else %}{{ message['content'] | trim }}{{ eos_token }}{% if not loop.last %}{{ '\n\n' }}{% endif %}"
    "{% endif %}{% endfor %}"
)


def check_template(model_dir: Path, settings: Settings) -> None:
    """Raise UserError if chats cannot be rendered as the model expects, because its template is code."""
    config = model_dir / "config.json"
    family = read_json_object(config).get("model_type", "") if config.is_file() else ""
    if settings.chat_template is not None or not family_of(family).prompts_by_code:
        return
    if not tokenizer_in(model_dir, trust_remote_code=settings.trust_remote_code).chat_template:
        raise UserError(
            f"{settings.model} has no chat template: {family} models are published with Python code instead.",
            "Set chat_template; docs/models.md has one for chats without tools and reasoning.",
        )


def leave_out_torch(settings: Settings) -> None:
    """Import transformers without torch in this process, which then loads no model, if the settings allow it.

    Image processors need torch, and the code of a model's folder may need it.
    """
    if settings.vision is None and not settings.trust_remote_code:
        import_transformers_without_torch()


def load_tokenizer(model_dir: Path, settings: Settings) -> Any:
    """Load the tokenizer of a local model folder, with a chat template; raises UserError.

    The template is the setting ``chat_template``, the tokenizer's, or :data:`INSTRUCTION_TEMPLATE`.
    """
    try:
        tokenizer = tokenizer_in(model_dir, trust_remote_code=settings.trust_remote_code)
        tokenizer("a")  # some broken files load but fail here
        if tokenizer.eos_token is None and not (model_dir / "tokenizer_config.json").is_file():
            raise ValueError("tokenizer_config.json, which names the special tokens, is missing")
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        # tokenizers may raise anything for broken files
        raise UserError(
            f"The tokenizer in {model_dir} cannot be loaded: {one_line(error)}",
            "Use the tokenizer's files that were published with the weights.",
        ) from None
    tokenizer.add_tokens(list(settings.new_tokens))  # tokens that exist are kept
    if settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    elif not tokenizer.chat_template:
        bos = "{{ bos_token }}" if _adds_bos(tokenizer) else ""
        eos = "{{ eos_token }}" if tokenizer.eos_token else ""
        template = INSTRUCTION_TEMPLATE.replace("{{ bos_token }}", bos).replace("{{ eos_token }}", eos)
        tokenizer.chat_template = template
    return tokenizer if settings.vision is None else VisionTokenizer(tokenizer, model_dir)


def _is_panic(error: BaseException) -> bool:
    """Whether an error is a panic of tokenizers (in Rust), whose class is not derived from Exception."""
    return type(error).__name__ == "PanicException"


def pad_id_of(tokenizer: Any) -> int:
    """Return the token id for padding: the padding token's, or the end of sequence's, or 0."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(int(token) for token in candidates if token is not None)


Rendered = TypeVar("Rendered")


@dataclass(kw_only=True, slots=True)
class TextLimit:
    """Limit of rendered texts that are truncated after tokenization.

    Tokenizing a text takes time and memory in proportion to its length. A text above
    :data:`LONG_TEXT_CHARS` characters is cut at twice the characters that ``tokens`` of the longest token of
    the vocabulary have: cutting a text can change only tokens next to the cut. If the rest has no more than
    ``tokens`` tokens (a tokenizer may remove characters), the complete text is tokenized.
    """

    tokens: int
    """Number of tokens that are kept."""
    cut: int = 0
    """Number of texts cut so far."""
    _chars: int = 0

    def cut_at(self, text: str, tokenizer: Any) -> int | None:
        """Return the position at which to cut a rendered text; None to keep it."""
        if len(text) <= LONG_TEXT_CHARS:
            return None
        if not self._chars:
            self._chars = 2 * self.tokens * max(map(len, tokenizer.get_vocab()))
        position = max(self._chars, LONG_TEXT_CHARS)
        return position if position < len(text) else None


def tokenize(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    *,
    train_on_prompt: bool = False,
    last_turn_only: bool = False,
    limit: TextLimit | None = None,
) -> Iterator[Tokens]:
    """Tokenize conversations, with masks of the tokens that count in the loss.

    The tokens of the assistant's turns count, and all tokens of plain text. ``train_on_prompt``: the other
    turns count too. ``last_turn_only``: of the assistant's turns, only the last one counts.

    If the chat template marks the assistant's text with ``{% generation %}``, the marked tokens count;
    without marks, white space after the token that ends a turn does not count. The first token of a row never
    counts, because nothing predicts it. An end-of-sequence token is appended if the chat template has not
    ended the last turn. ``limit``: the beginning of long texts is sufficient.
    """
    for start in range(0, len(conversations), _BATCH):
        batch = conversations[start : start + _BATCH]
        yield from _tokenize(batch, tokenizer, train_on_prompt, last_turn_only, limit)


def _tokenize(
    conversations: Sequence[Conversation],
    tokenizer: Any,
    train_on_prompt: bool,
    last_turn_only: bool,
    limit: TextLimit | None = None,
) -> Iterator[Tokens]:
    """Tokenize one batch of conversations (:func:`tokenize`)."""
    import numpy as np  # imported here: most processes that import this module tokenize nothing

    turn_end = _TurnEnd(tokenizer)
    template_marks = _marks_answers(tokenizer)
    turns_by_row = [_turns_to_mask(item, train_on_prompt, last_turn_only) for item in conversations]
    rendered = [
        _expand_images(item, tokenizer, *_render(item, tokenizer, turns))
        for item, turns in zip(conversations, turns_by_row, strict=True)
    ]
    cut_rows = [False] * len(conversations)
    if limit is not None:
        for number, (conversation, (text, cuts)) in enumerate(zip(conversations, rendered, strict=True)):
            position = None if conversation.images else limit.cut_at(text, tokenizer)
            if position is not None:
                rendered[number] = text[:position], [cut for cut in cuts if cut < position]
                cut_rows[number] = True
    chats = [text for (text, _), c in zip(rendered, conversations, strict=True) if c.messages]
    texts = [text for (text, _), c in zip(rendered, conversations, strict=True) if c.text is not None]
    chat_ids = iter(_token_ids(tokenizer, chats, special=False))
    text_ids = iter(_token_ids(tokenizer, texts, special=True))
    prefixes = iter(
        _token_ids(tokenizer, [text[:cut] for text, cuts in rendered for cut in cuts], special=False)
    )
    for conversation, (text, cuts), is_cut in zip(conversations, rendered, cut_rows, strict=True):
        ids = next(chat_ids) if conversation.messages else _trim_part(next(text_ids), conversation, tokenizer)
        prefix_ids = [next(prefixes) for _ in cuts]
        bounds = [len(prefix) for prefix in prefix_ids]
        if any(ids[: len(prefix)] != prefix for prefix in prefix_ids):
            ids, bounds = _tokenize_parts(conversation, tokenizer, text, cuts)
        if is_cut and limit is not None:
            if len(ids) <= limit.tokens:
                yield from _tokenize([conversation], tokenizer, train_on_prompt, last_turn_only)
                continue
            limit.cut += 1
        counted = np.zeros(len(ids) + 1, dtype=np.bool_)
        count_all = train_on_prompt or not conversation.messages
        counted[:] = count_all
        for first, last in itertools.zip_longest(bounds[::2], bounds[1::2], fillvalue=len(ids)):
            end = last if template_marks or count_all else turn_end.end_of_turn(ids, first, last)
            counted[first:end] = not count_all
        if conversation.images:
            counted[: len(ids)] &= ~np.isin(ids, tokenizer.image_ids)
        counted[0] = False
        eos = turn_end.eos_to_append(ids) if conversation.ends else None
        if eos is not None:
            counted[len(ids)] = not conversation.messages or conversation.messages[-1].trained
            ids = [*ids, eos]
        yield np.array(ids, dtype=np.int32), counted[: len(ids)]


def _trim_part(ids: list[int], text: Conversation, tokenizer: Any) -> list[int]:
    """Remove the begin token unless the section begins its document, and the end token unless it ends it."""
    if not text.begins and ids[:1] == [tokenizer.bos_token_id]:
        ids = ids[1:]
    if not text.ends and ids[-1:] == [tokenizer.eos_token_id]:
        ids = ids[:-1]
    return ids


def _tokenize_parts(
    conversation: Conversation, tokenizer: Any, text: str, cuts: list[int]
) -> tuple[list[int], list[int]]:
    """Tokenize the parts of a text between ``cuts`` separately; return the tokens, and the index of each cut.

    Used if the tokenizer merges the end of a turn and the beginning of the next into one token: at inference
    the prompt is tokenized separately, so an answer must start with a new token. Raises UserError if the
    parts decode to another text, e.g. with a tokenizer that puts a space before each text.
    """
    parts = [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    parts_ids = _token_ids(tokenizer, parts, special=False)
    ids = list(itertools.chain.from_iterable(parts_ids))
    joint_ids = _token_ids(tokenizer, [text], special=False)[0]
    if tokenizer.decode(ids) != tokenizer.decode(joint_ids):
        cut = next(cut for cut in cuts)
        raise _merged_tokens_error(conversation, text[max(0, cut - 20) : cut], text[cut : cut + 20])
    return ids, list(itertools.accumulate(len(part) for part in parts_ids[:-1]))


def answer_end_token(tokenizer: Any, messages: Sequence[Message]) -> int | None:
    """Return the id of the token that ends an answer in training; None if the tokenizer has none.

    ``messages``: any chat that ends with an answer.
    """
    ids, _ = next(tokenize([Conversation(messages=tuple(messages))], tokenizer))
    return _TurnEnd(tokenizer).end_token(ids.tolist())


def render_messages(messages: Sequence[Message], tokenizer: Any, *, prompt: bool = False) -> str:
    """Render a chat with the template. ``prompt``: append the generation prompt."""
    chat = Conversation(messages=tuple(messages))
    return _apply(tokenizer, chat, [message.as_template() for message in messages], prompt)


def _token_ids(tokenizer: Any, texts: list[str], *, special: bool) -> list[list[int]]:
    """Tokenize texts. ``special``: add begin and end tokens as the tokenizer does by default."""
    if not texts:
        return []
    # verbose=False: no warning about rows longer than the model's limit, which are truncated later
    try:
        encoded = tokenizer(texts, add_special_tokens=special, return_attention_mask=False, verbose=False)
    except BaseException as error:
        if not _is_panic(error):
            raise
        raise UserError(
            f"The tokenizer fails on a text of the dataset: {one_line(error)}",
            "Use the tokenizer's files that were published with the weights.",
        ) from None
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _turns_to_mask(conversation: Conversation, train_on_prompt: bool, last_turn_only: bool) -> list[int]:
    """Return the assistant's turns whose mask differs from the default of the row.

    By default nothing counts, so these are the turns that count; with ``train_on_prompt``, everything counts
    by default, so these are the turns that do not (``weight`` 0).
    """
    answers = [index for index, message in enumerate(conversation.messages) if message.role == "assistant"]
    if last_turn_only:
        return answers[-1:]
    return [index for index in answers if conversation.messages[index].trained != train_on_prompt]


def _render(conversation: Conversation, tokenizer: Any, turns: list[int]) -> tuple[str, list[int]]:
    """Render a row; return the text, and start and end of each of ``turns`` in it.

    The end of the last turn is omitted if it is the end of the text.
    """
    if conversation.text is not None:
        return conversation.text, []
    messages = [message.as_template() for message in conversation.messages]
    full_text = _apply(tokenizer, conversation, messages)
    _check_contents(conversation, full_text)
    _check_tools(conversation, full_text)
    spans: list[Span] = []
    if _marks_answers(tokenizer):
        spans = marked_spans(messages, turns, partial(_template_spans, tokenizer, conversation))
        if turns and not spans:
            raise UserError(
                f"{_location(conversation)}: the chat template marks no part of the assistant's turns.",
                "Put the answers between {% generation %} and {% endgeneration %} in chat_template.",
            )
    else:
        render = partial(_apply, tokenizer, conversation)
        special = [value.content for value in tokenizer.added_tokens_decoder.values() if value.special]
        for index in turns:
            span = turn_span(messages, index, full_text, render, special)
            if span is None:
                raise UserError(
                    f"{_location(conversation)}: the chat template renders the beginning of this chat "
                    f"differently than in the complete chat, so the assistant's turn {index + 1} cannot be "
                    "found in it.",
                    "Set chat_template to one that only appends (or split such chats into single answers).",
                )
            spans.append(span)
    _check_calls(conversation, turns, "".join(full_text[start:end] for start, end in spans))
    cuts = list(itertools.chain.from_iterable(spans))
    return full_text, cuts[:-1] if cuts[-1:] == [len(full_text)] else cuts


def _expand_images(
    conversation: Conversation, tokenizer: Any, text: str, cuts: list[int]
) -> tuple[str, list[int]]:
    """Replace the image placeholders in a rendered text by image tokens; return text and shifted cuts."""
    if not conversation.images:
        return text, cuts
    try:
        expanded: tuple[str, list[int]] = tokenizer.expand_images(conversation.images, text, cuts)
    except ValueError as error:  # raised by processors of transformers
        raise UserError(
            f"{_location(conversation)}: its images cannot be processed: "
            f"{one_line(error).removesuffix('.')}.",
            "Change the row, or its images.",
        ) from None
    return expanded


def _marks_answers(tokenizer: Any) -> bool:
    """Whether the tokenizer's chat template marks the assistant's text."""
    template = tokenizer.chat_template
    return isinstance(template, str) and has_marks(template)


def _template_spans(tokenizer: Any, conversation: Conversation, messages: Messages) -> list[Span]:
    """Render messages, and return the spans that the template marks."""
    if not messages:
        return []
    from transformers.utils.chat_template_utils import render_jinja_template

    def spans(values: list[dict[str, Any]]) -> list[Span]:
        if isinstance(tokenizer, VisionTokenizer):
            values = to_content_parts(values)
        _, marked = render_jinja_template(
            [values],
            tools=json.loads(conversation.tools) if conversation.tools else None,
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        return list(marked[0])

    return _with_either_arguments(spans, list(messages), conversation)


def _check_contents(conversation: Conversation, text: str) -> None:
    """Raise UserError if the rendered text lacks the content of a turn.

    Only the last line of each turn is searched, because templates may trim a turn, remove the reasoning at
    its beginning, or encode it as JSON.
    """
    for number, message in enumerate(conversation.messages, start=1):
        last_line = message.content.strip().rpartition("\n")[2].rpartition(IMAGE)[2].strip()
        if last_line not in text and json.dumps(last_line, ensure_ascii=False)[1:-1] not in text:
            raise UserError(
                f"{_location(conversation)}: the chat template omits the content of turn {number} "
                f"({message.role}).",
                "Set chat_template to one that renders it, or remove such turns from the rows.",
            )


def _check_tools(conversation: Conversation, text: str) -> None:
    """Raise UserError if the rendered text lacks the name of a tool or of a tool call."""
    if not conversation.tools and not any(message.tool_calls for message in conversation.messages):
        return
    functions = json.loads(conversation.tools or "[]")
    for message in conversation.messages:
        functions += json.loads(message.tool_calls or "[]")
    names = [function["function"]["name"] for function in functions]
    missing = next((name for name in names if name not in text), None)
    if missing is not None:
        raise UserError(
            f"{_location(conversation)}: the chat template omits the tool {missing}.",
            "Set chat_template to one that renders `tools` and `tool_calls`, or use another model.",
        )


def _check_calls(conversation: Conversation, turns: Sequence[int], answers: str) -> None:
    """Raise UserError if ``answers``, the rendered text of these turns, lacks the name of a called tool."""
    for index in turns:
        for call in json.loads(conversation.messages[index].tool_calls or "[]"):
            name = call["function"]["name"]
            if name not in answers:
                raise UserError(
                    f"{_location(conversation)}: the chat template omits the call of the tool {name} in turn "
                    f"{index + 1}.",
                    "Set chat_template to one that renders `tool_calls`, or write the call into the content.",
                )


def _apply(tokenizer: Any, conversation: Conversation, messages: Messages, prompt: bool = False) -> str:
    """Render messages of a conversation with its tools. ``prompt``: append the generation prompt."""

    def text(values: list[dict[str, Any]]) -> str:
        rendered: str = tokenizer.apply_chat_template(
            values,
            tools=json.loads(conversation.tools) if conversation.tools else None,
            tokenize=False,
            add_generation_prompt=prompt,
        )
        return checked_length(rendered, messages, conversation.tools)

    return _with_either_arguments(text, list(messages), conversation)


@contextmanager
def template_limits() -> Iterator[None]:
    """Limit CPU time and memory of a chat template; raises TimeoutError or MemoryError."""
    try:
        with cpu_limit(TEMPLATE_LIMIT_S), memory_limit(TEMPLATE_LIMIT_BYTES):
            yield
    except MemoryError:
        raise MemoryError(f"it needs more than {TEMPLATE_LIMIT_BYTES // 2**20} MiB") from None


def checked_length(rendered: str, messages: Sequence[Mapping[str, Any]], tools: str = "") -> str:
    """Return ``rendered``; raises ValueError if it is much longer than the chat."""
    chat_chars = len(tools) + sum(len(str(message)) for message in messages)
    if len(rendered) > _ALWAYS_ALLOWED_CHARS + _MAX_EXPANSION * chat_chars:
        raise ValueError(f"it makes {len(rendered):,} characters of a chat of {chat_chars:,}")
    return rendered


def _with_either_arguments(
    render: Callable[[list[dict[str, Any]]], Rendered],
    messages: list[dict[str, Any]],
    conversation: Conversation,
) -> Rendered:
    """Render with the arguments of tool calls as objects, or as JSON text if that fails.

    Raises UserError if both fail.
    """
    try:
        with template_limits():
            return render(messages)
    except Exception as error:  # noqa: BLE001 - a template is a program, which can fail in any way
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        # Templates of DeepSeek need text
        if any(isinstance(call["function"]["arguments"], dict) for call in calls):
            return _with_either_arguments(render, _with_text_arguments(messages), conversation)
        raise UserError(
            f"{_location(conversation)}: the chat template refuses it: {one_line(error).removesuffix('.')}.",
            "Change the row, or set chat_template.",
        ) from None


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert the arguments of tool calls to JSON text, as in OpenAI's API."""
    converted = copy.deepcopy(messages)
    for message in converted:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return converted


def prompt_of(conversation: Conversation, tokenizer: Any) -> tuple[str, str]:
    """Return the rendered prompt, with special tokens, and the reference answer.

    The reference is the last answer of a chat, empty if the chat ends with a question; for plain text, it is
    the text after the prompt.
    """
    if conversation.text is None:
        prompt_conversation = replace(conversation, messages=conversation.prompt_messages)
        messages = [message.as_template() for message in prompt_conversation.messages]
        prompt = _apply(tokenizer, prompt_conversation, messages, prompt=True)
        _check_contents(prompt_conversation, prompt)
        _check_tools(prompt_conversation, prompt)
        has_answer = len(prompt_conversation.messages) < len(conversation.messages)
        return prompt, conversation.messages[-1].content if has_answer else ""
    beginning = text_prompt(conversation.text)
    prompt = (tokenizer.bos_token if _adds_bos(tokenizer) else "") + beginning
    return prompt, conversation.text[len(beginning) :][:_REFERENCE_CHARS]


def text_prompt(text: str) -> str:
    """Return the beginning of a text as prompt: whole words, at most half of the text."""
    cut = min(len(text) // 2, _PROMPT_CHARS)
    cut = text.rfind(" ", 0, cut + 1) if " " in text[: cut + 1] else cut
    return text[:cut]


def _merged_tokens_error(conversation: Conversation, first: str, second: str) -> UserError:
    """Build the error for a token that belongs to two turns. ``first``, ``second``: text around the cut."""
    return UserError(
        f"{_location(conversation)}: the tokenizer merges the end of one turn and the beginning of the next "
        f"into one token ({first!r} and {second!r}), so it is unknown whether that counts in the loss.",
        "Remove white space there: at the beginning of the answer, or at the end of the template's prompt.",
    )


class _TurnEnd:
    """Detection of the tokens that end a turn, for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.eos: int | None = tokenizer.eos_token_id
        added_tokens = tokenizer.added_tokens_decoder.items()
        self._ends = {token for token, value in added_tokens if value.special} | {self.eos}
        self._blank = {
            ids[0] for ids in _token_ids(tokenizer, ["\n", "\n\n", " "], special=False) if len(ids) == 1
        }

    def end_of_turn(self, ids: list[int], first: int, last: int) -> int:
        """Return the end of the turn ``ids[first:last]`` without white space after its end token."""
        end = last
        while end > first and ids[end - 1] in self._blank:
            end -= 1
        return end if end > first and ids[end - 1] in self._ends else last

    def eos_to_append(self, ids: list[int]) -> int | None:
        """Return the EOS token to append; None if the row has an end token, or the tokenizer has no EOS."""
        return self.eos if self.end_token(ids) is None else None

    def end_token(self, ids: list[int]) -> int | None:
        """Return the end token of the row's last turn, ignoring white space; None if there is none."""
        last = next((token for token in reversed(ids) if token not in self._blank), None)
        return last if last in self._ends else None


def _adds_bos(tokenizer: Any) -> bool:
    """Whether the tokenizer puts a begin-of-sequence token before texts."""
    ids = _token_ids(tokenizer, ["a"], special=True)[0]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def _location(conversation: Conversation) -> str:
    """Name a row in messages by its line."""
    return f"Dataset, line {conversation.line}" if conversation.line else "Dataset"


def one_line(error: BaseException) -> str:
    """Return an error's message as one line of at most 300 characters."""
    return " ".join(str(error).split())[:300]
