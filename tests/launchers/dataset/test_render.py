"""Rendering of conversations to tokens: counted tokens, the template used, and refused templates."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from estimator.errors import UserError
from launchers.dataset.render import check_template, load_tokenizer, prompt_of, tokenize
from launchers.dataset.rows import Conversation, parse
from launchers.dataset.turns import Message
from launchers.settings import Settings, build
from tests.launchers.dataset.chats import CHATML, chat

# Like Qwen 3's: an earlier answer is rendered otherwise than the last one.
FORGETFUL = (
    "{% for m in messages %}{{ m['role'] + ':' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ ' (thought)' }}{% endif %}"
    "{{ ' ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
DROPPING = (
    "{%% for m in messages %%}{%% if m.role != '%s' %%}{{ m.content }}{{ eos_token }}{%% endif %%}"
    "{%% endfor %%}"
)


def counted_text(conversation: Conversation, tokenizer: Any) -> str:
    ((tokens, counted),) = tokenize([conversation], tokenizer)
    return str(tokenizer.decode(tokens[counted]))


class TestTemplatesThatAreCode:
    DOCUMENT = Path(__file__).parents[3] / "docs" / "models.md"

    @pytest.fixture
    def folder(self, tokenizer: Any, tmp_path: Path) -> Path:
        plain = copy.deepcopy(tokenizer)
        plain.chat_template = None
        plain.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
        return tmp_path

    def test_chats_are_refused_until_a_template_is_set(self, folder: Path) -> None:
        with pytest.raises(UserError, match="deepseek_v4 models are published with Python code") as caught:
            check_template(folder, build({}))
        assert "chat_template" in (caught.value.advice)
        check_template(folder, build({"chat_template": CHATML}))
        (folder / "config.json").write_text('{"model_type": "llama"}')
        check_template(folder, build({}))

    def test_the_template_of_the_document_renders_the_mode_chat_of_the_published_code(
        self, folder: Path
    ) -> None:
        (block,) = re.findall(r"```yaml\n(model: deepseek-v4.*?)```", self.DOCUMENT.read_text(), re.DOTALL)
        tokenizer = load_tokenizer(folder, build(yaml.safe_load(block)))
        rendered = tokenizer.apply_chat_template(
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
                {"role": "user", "content": "1+1?"},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        begin, end = tokenizer.bos_token, tokenizer.eos_token
        user, answer = "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c></think>"  # with wide bars
        assert rendered == f"{begin}Be brief.{user}Hi{answer}Hello{end}{user}1+1?{answer}"
        assert counted_text(chat("Hi", "Hello"), tokenizer) == f"Hello{end}"


class TestMasking:
    def test_every_token_of_plain_text_but_the_first_counts(self, tokenizer: Any) -> None:
        ((tokens, counted),) = tokenize([Conversation(text="Once upon a time")], tokenizer)
        assert tokenizer.decode(tokens) == "<|begin_of_text|>Once upon a time<|eot_id|>"
        assert counted.tolist() == [False] + [True] * (len(tokens) - 1)

    def test_prompt_tokens_count_if_train_on_prompt_is_set(self, tokenizer: Any) -> None:
        ((tokens, counted),) = tokenize([chat("Hi", "Hello")], tokenizer, train_on_prompt=True)
        assert counted.tolist() == [False] + [True] * (len(tokens) - 1)

    def test_tokens_equal_those_of_the_transformers_chat_template(self, tokenizer: Any) -> None:
        conversation = chat("Hi", "Hello there", "Bye", "See you")
        messages = [dataclasses.asdict(message) for message in conversation.messages]
        ((tokens, _),) = tokenize([conversation], tokenizer)
        assert tokens.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]

    def test_chats_and_texts_may_be_mixed(self, tokenizer: Any) -> None:
        mixed = [Conversation(text="one"), chat("Hi", "Hello"), Conversation(text="two"), chat("a", "b")]
        together = [tokens.tolist() for tokens, _ in tokenize(mixed, tokenizer)]
        alone = [next(tokenize([row], tokenizer))[0].tolist() for row in mixed]
        assert together == alone

    # The template trims, and a special token's name in the text would be that token.
    words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), min_size=1).filter(
        lambda text: text == text.strip() and text != ""
    )

    @given(contents=st.lists(st.tuples(words, words), min_size=1, max_size=4), system=st.none() | words)
    @hypothesis_settings(max_examples=60, deadline=None)
    def test_exactly_the_tokens_of_answers_count(
        self, tokenizer: Any, contents: list[tuple[str, str]], system: str | None
    ) -> None:
        conversation = chat(*(text for pair in contents for text in pair), system=system)
        expected = "".join(answer + "<|eot_id|>" for _, answer in contents)
        assert counted_text(conversation, tokenizer) == expected


class TestTemplates:
    def test_the_template_of_the_settings_takes_precedence_and_a_missing_end_token_is_added(
        self, model: Path
    ) -> None:
        template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        template += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
        tokenizer = load_tokenizer(model, build({"chat_template": template}))
        assert counted_text(chat("Hi", "Hello"), tokenizer) == " Hello\n<|eot_id|>"

    def test_a_base_model_gets_the_plain_instruction_template(self, base_model: Path) -> None:
        tokenizer = load_tokenizer(base_model, Settings())
        conversation = chat("Hi", "Hello", "Bye", "See you", system="Be brief.")
        ((tokens, _),) = tokenize([conversation], tokenizer)
        assert tokenizer.decode(tokens) == (
            "<|begin_of_text|>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nHello<|end_of_text|>\n\n"
            "### Instruction:\nBye\n\n### Response:\nSee you<|end_of_text|>"
        )
        assert counted_text(conversation, tokenizer) == "Hello<|end_of_text|>See you<|end_of_text|>"

    def test_a_template_may_omit_parts_of_earlier_answers(self, model: Path) -> None:
        tokenizer = load_tokenizer(model, build({"chat_template": FORGETFUL}))
        assert counted_text(chat("Hi", "Hello"), tokenizer).startswith(" (thought) Hello")
        row = chat("Hi", "Hello", "Bye", "See you", line=7)
        assert counted_text(row, tokenizer).startswith(" Hello\n (thought) See you")

    def test_a_template_that_rewrites_earlier_turns_is_refused(self, model: Path) -> None:
        template = FORGETFUL.replace("' ' + m['content']", "m['content'] + (messages | length | string)")
        tokenizer = load_tokenizer(model, build({"chat_template": template}))
        with pytest.raises(UserError, match=r"line 7: the chat template renders the beginning .* turn 2"):
            list(tokenize([chat("Hi", "Hello", "Bye", "See you", line=7)], tokenizer))

    def test_an_answer_whose_tokens_merge_with_the_prompt_is_tokenized_by_turns(self, model: Path) -> None:
        """At inference the model gets the tokens of the prompt alone and continues with the answer."""
        tokenizer = load_tokenizer(model, build({"chat_template": CHATML}))
        row = chat("Hi", "\n\nHello", line=3)
        assert counted_text(row, tokenizer).startswith("\n\nHello")
        ((ids, counted),) = tokenize([row], tokenizer)
        prompt, _ = prompt_of(row, tokenizer)
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert ids[: len(prompt_ids)].tolist() == prompt_ids
        assert counted.argmax() == len(prompt_ids)
        assert tokenizer.decode(ids).startswith(prompt)

    def test_a_prompt_that_ends_in_a_space_is_tokenized_by_turns(self, model: Path) -> None:
        template = (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}"
        )
        template += "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
        tokenizer = load_tokenizer(model, build({"chat_template": template}))
        row = chat("Hi", "Hello there", "Bye", "See you", line=3)
        counted = counted_text(row, tokenizer)
        assert counted.startswith("Hello there")
        assert "See you" in counted
        assert "Bye" not in counted

    def test_turns_that_tokenize_differently_alone_are_refused(self, model: Path) -> None:
        tokenizer = load_tokenizer(model, build({"chat_template": CHATML}))
        row = chat("Hi", "\n\nHello", line=3)
        tokenizer.decode = str  # no two lists of tokens say the same
        with pytest.raises(UserError, match="line 3: the tokenizer merges"):
            list(tokenize([row], tokenizer))
        assert list(tokenize([row], tokenizer, train_on_prompt=True))

    @pytest.mark.parametrize(
        ("template", "expected"),
        [
            (DROPPING % "system", "omits the content of turn 1 (system)"),
            (DROPPING % "user", "omits the content of turn 2 (user)"),
            (DROPPING % "assistant", "omits the content of turn 3 (assistant)"),
            ("{{ 1 / 0 }}", "refuses it: division by zero"),
            ("{{ rendered(messages) }}", "refuses it: 'rendered' is undefined"),
            ("{% for m in messages %}", "refuses it: Unexpected end of template"),
        ],
    )
    def test_a_template_that_omits_a_turn_or_fails_is_refused_with_the_line(
        self, model: Path, template: str, expected: str
    ) -> None:
        tokenizer = load_tokenizer(model, build({"chat_template": template}))
        with pytest.raises(UserError, match=f"line 5: the chat template {re.escape(expected)}"):
            list(tokenize([chat("Hi", "Good morning", system="Be brief.", line=5)], tokenizer))

    def test_a_template_may_trim_a_turn_remove_its_reasoning_or_write_it_as_json(self, model: Path) -> None:
        template = (
            "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim if m.role == 'assistant' "
            "else m.content | tojson }}{{ eos_token if m.role == 'assistant' }}\n{% endfor %}"
        )
        tokenizer = load_tokenizer(model, build({"chat_template": template}))
        row = chat('Say "hé"\nnow', "<think>\nShould I?\n</think>\n\nhé\n")
        assert counted_text(row, tokenizer).startswith("hé")

    def test_an_answer_without_reasoning_starts_with_the_whole_end_tag(self, model: Path) -> None:
        """As with GLM 4.7's and DeepSeek V3.2's templates, whose generation prompt ends in <think>."""
        template = (
            "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}"
            "{{ '<think>' + m.reasoning_content if m.reasoning_content }}</think>{% endif %}"
            "{{ m.content + eos_token }}{% endfor %}"
            "{% if add_generation_prompt %}assistant: <think>{% endif %}"
        )
        tokenizer = load_tokenizer(model, build({"chat_template": template}))
        tokenizer.add_tokens(["<think>", "</think>"])
        assert counted_text(parse({"messages": CHAT[2:]}), tokenizer) == "Leave?</think>See you<|eot_id|>"
        row = chat("Hi", "Hello", "Bye", "See you")
        ((tokens, counted),) = tokenize([row], tokenizer)
        assert tokenizer.decode(tokens[counted]) == "</think>Hello<|eot_id|></think>See you<|eot_id|>"
        messages = [message.as_template() for message in row.messages]
        assert tokens.tolist() == tokenizer.apply_chat_template(messages)["input_ids"]

    def test_a_folder_without_a_tokenizer_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="tokenizer"):
            load_tokenizer(tmp_path, Settings())

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("tokenizer.json", b""),
            ("tokenizer_config.json", None),  # which names the special tokens of this one
        ],
    )
    def test_a_broken_tokenizer_is_refused_without_a_traceback(
        self, model: Path, tmp_path: Path, name: str, content: bytes | None
    ) -> None:
        shutil.copytree(model, tmp_path / "model")
        (tmp_path / "model" / name).unlink()
        if content is not None:
            (tmp_path / "model" / name).write_bytes(content)
        with pytest.raises(UserError, match="cannot be loaded") as refused:
            load_tokenizer(tmp_path / "model", Settings())
        assert refused.value.advice


# Renders tools and their calls, as models' own templates do.
WITH_TOOLS = (
    "{% if tools %}<|start_header_id|>tools {{ tools | tojson }}<|eot_id|>{% endif %}"
    "{% for m in messages %}{{ m['role'] + '<|end_header_id|>' }}{% if m['tool_calls'] %}"
    "{% for c in m['tool_calls'] %}{{ c['function']['name'] }}({{ c['function']['arguments'] | tojson }})"
    "{% endfor %}{% endif %}{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant<|end_header_id|>' }}{% endif %}"
)


class TestTools:
    row = parse(
        {
            "messages": [
                {"role": "user", "content": "Sum?"},
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}],
                },
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "It is 3."},
            ],
            "tools": [{"name": "add", "description": "Adds."}],
        },
        5,
    )

    def test_tool_calls_and_answers_count_and_tool_results_do_not(self, model: Path) -> None:
        tokenizer = load_tokenizer(model, build({"chat_template": WITH_TOOLS}))
        ((tokens, _),) = tokenize([self.row], tokenizer)
        text = tokenizer.decode(tokens)
        assert '"description": "Adds."' in text
        assert "tool<|end_header_id|>3<|eot_id|>" in text
        assert counted_text(self.row, tokenizer) == 'add({"a": 1})<|eot_id|>It is 3.<|eot_id|>'

    def test_a_template_that_omits_tools_is_refused_with_the_line(self, tokenizer: Any) -> None:
        with pytest.raises(UserError, match="line 5: the chat template omits the tool add"):
            list(tokenize([self.row], tokenizer))

    def test_a_template_that_omits_tool_calls_is_refused_with_the_line(self, model: Path) -> None:
        """As LFM2's and Granite 3.3's, which render ``tools`` only."""
        calls = WITH_TOOLS[WITH_TOOLS.index("{% if m['tool_calls']") : WITH_TOOLS.index("{{ m['content'] }}")]
        tokenizer = load_tokenizer(model, build({"chat_template": WITH_TOOLS.replace(calls, "")}))
        with pytest.raises(
            UserError, match="line 5: the chat template omits the call of the tool add in turn"
        ):
            list(tokenize([self.row], tokenizer))

    def test_a_template_may_refuse_a_tool_result_without_a_call(self, model: Path) -> None:
        """As MiniMax M2's, whose prompt also begins a reasoning block that earlier answers lack."""
        template = WITH_TOOLS.replace(
            "{% for m in messages %}",
            "{% for m in messages %}{% if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
            "{{ raise_exception('result without a call') }}{% endif %}",
        ).replace("{{ 'assistant<|end_header_id|>' }}", "{{ 'assistant<|end_header_id|><think>\n' }}")
        tokenizer = load_tokenizer(model, build({"chat_template": template}))
        assert counted_text(self.row, tokenizer) == 'add({"a": 1})<|eot_id|>It is 3.<|eot_id|>'


class TestWeights:
    row = parse(
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello", "weight": 0},
                {"role": "user", "content": "Bye"},
                {"role": "assistant", "content": "See you", "weight": 1},
                {"role": "user", "content": "Why?"},
                {"role": "assistant", "content": "So", "weight": 0},
            ]
        }
    )

    def test_turns_of_weight_zero_are_context_and_do_not_count(self, tokenizer: Any) -> None:
        assert counted_text(self.row, tokenizer) == "See you<|eot_id|>"

    def test_turns_of_weight_zero_do_not_count_even_if_prompts_do(self, tokenizer: Any) -> None:
        ((tokens, counted),) = tokenize([self.row], tokenizer, train_on_prompt=True)
        text = tokenizer.decode(tokens[~counted])
        assert text == "<|begin_of_text|>Hello<|eot_id|>So<|eot_id|>"

    def test_an_end_token_added_to_a_turn_of_weight_zero_does_not_count(self, model: Path) -> None:
        template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        template += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
        tokenizer = load_tokenizer(model, build({"chat_template": template}))
        assert counted_text(self.row, tokenizer) == " See you\n"


SPECIAL = re.compile(
    r"<[|\uff5c][\w\u2581|\uff5c]*[|\uff5c]>|<(?:start|end)_of_turn>"
    r"|<\|[a-z_]+>|<[a-z_]+\|>"  # Gemma 4
)
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<b>Hello</b>", "reasoning_content": "Greet?"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you", "reasoning_content": "Leave?"},
]
CALL = [
    *TestTools.row.messages,
    Message(role="user", content="Thanks"),
    Message(role="assistant", content="Welcome"),
]
TOOL_CHAT = dataclasses.replace(
    TestTools.row,
    messages=tuple(CALL),
    tools='[{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": '
    '{"type": "object", "properties": {"a": {"type": "integer", "description": "A."}}}}}]',
)


def with_template(model: Path, name: str) -> Any:
    """Return the tokenizer of the tiny model with a chat template of TRL and its special tokens."""
    templates = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
    tokenizer = load_tokenizer(model, Settings())
    tokenizer.chat_template = (templates / f"{name}.jinja").read_text()
    special = sorted(set(SPECIAL.findall(tokenizer.chat_template)))
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


class TestMarks:
    @pytest.mark.parametrize("row", [parse({"messages": CHAT}), TOOL_CHAT], ids=["reasoning", "tools"])
    @pytest.mark.parametrize(
        "name",
        [
            *("qwen3", "qwen3_5_think", "qwen3_8", "glm4moe", "gptoss", "nemotron_3_nano"),
            *("nemotron_3_5_lightning", "lfm2_v2", "deepseekv3", "qwen3_6", "muse_glimmer"),
        ],
    )
    def test_generation_marks_of_a_template_select_the_tokens_that_transformers_selects(
        self, model: Path, name: str, row: Conversation
    ) -> None:
        tokenizer = with_template(model, f"{name}_training")
        expected = tokenizer.apply_chat_template(
            [message.as_template() for message in row.messages],
            tools=json.loads(row.tools or "null"),
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
        ((tokens, counted),) = tokenize([row], tokenizer)
        length = len(expected["input_ids"])
        assert tokens[:length].tolist() == expected["input_ids"]
        assert counted[:length].astype(int).tolist() == expected["assistant_masks"]
        assert 0 < sum(expected["assistant_masks"]) < length <= len(tokens) <= length + 1

    def test_tokens_marked_in_turns_that_are_not_trained_do_not_count(self, model: Path) -> None:
        tokenizer = with_template(model, "qwen3_training")
        ((tokens, counted),) = tokenize([TestWeights.row], tokenizer)
        assert tokenizer.decode(tokens[counted]).split() == ["<think>", "</think>", "See", "you<|im_end|>"]
        ((tokens, counted),) = tokenize([TestWeights.row], tokenizer, last_turn_only=True)
        assert tokenizer.decode(tokens[counted]).split() == ["<think>", "</think>", "So<|im_end|>"]

    def test_a_template_whose_generation_marks_cover_no_turn_is_refused(self, model: Path) -> None:
        template = CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
        tokenizer = load_tokenizer(model, build({"chat_template": template}))
        with pytest.raises(UserError, match="line 3: the chat template marks no part"):
            list(tokenize([chat("Hi", "Hello", line=3)], tokenizer))

    @pytest.mark.parametrize(
        ("name", "reasoning", "tools"),
        [
            (
                "qwen3",
                "<b>Hello</b><|im_end|><think>\nLeave?\n</think>\n\nSee you<|im_end|>",
                '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
                "It is 3.<|im_end|><think>\n\n</think>\n\nWelcome<|im_end|>",
            ),
            (
                "qwen3_5_think",
                "<b>Hello</b><|im_end|>Leave?\n</think>\n\nSee you<|im_end|>",
                "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
                "<|im_end|>It is 3.<|im_end|>\n</think>\n\nWelcome<|im_end|>",
            ),
            (
                "gptoss",
                "<|channel|>final<|message|><b>Hello</b><|end|><|channel|>analysis<|message|>Leave?<|end|>"
                "<|start|>assistant<|channel|>final<|message|>See you<|return|>",
                ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
                "<|channel|>final<|message|>It is 3.<|end|><|channel|>final<|message|>Welcome<|return|>",
            ),
            ("deepseekv3", "<b>Hello</b><\uff5cend\u2581of\u2581sentence\uff5c>See you", "add"),
            (
                "gemma4_v5",
                "<b>Hello</b><turn|><|channel>thought\nLeave?\n<channel|>See you<turn|>",
                "<|tool_call>call:add{a:1}<tool_call|>",
            ),
            ("phi3", "<b>Hello</b><|end|>See you<|end|>\n<|eot_id|>", ""),
        ],
    )
    def test_without_generation_marks_rendered_reasoning_and_tool_calls_count(
        self, model: Path, name: str, reasoning: str, tools: str
    ) -> None:
        tokenizer = with_template(model, name)
        assert counted_text(parse({"messages": CHAT}), tokenizer).startswith(reasoning)
        if tools:
            assert tools in counted_text(TOOL_CHAT, tokenizer)
