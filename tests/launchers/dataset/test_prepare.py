import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from estimator.errors import UserError
from launchers.dataset.preferences import Pair
from launchers.dataset.prepare import best_fit, format_sample, prepare, split, summary
from launchers.dataset.prepared import IGNORE, Prepared
from launchers.dataset.render import prompt_of, tokenize
from launchers.dataset.rows import Conversation
from launchers.report.metrics import tokens_of_steps
from launchers.settings import build
from tests.launchers.dataset.chats import CHATML, chat, some


class TestPrepare:
    def test_the_prepared_folder_contains_the_tokenized_rows(
        self, model: Path, tokenizer: Any, tmp_path: Path
    ) -> None:
        rows = some(20)
        info = prepare(rows, model, build({"global_batch_size": 4}), 128, tmp_path / "data")
        data = Prepared(tmp_path / "data")
        assert data.info == info
        assert (info.rows, info.documents, len(data)) == (20, 20, 20)
        for index, (tokens, counted) in enumerate(tokenize(rows, tokenizer)):
            row = data.row(index)
            assert row.tokens.tolist() == tokens.tolist()
            assert row.labels.tolist() == np.where(counted, tokens, IGNORE).tolist()
            assert row.lengths.tolist() == [len(tokens)]
        assert info.label_tokens == sum(int(c.sum()) for _, c in tokenize(rows, tokenizer))
        assert (info.pad_id, info.vocab_size) == (tokenizer.pad_token_id, 4096)

    def test_every_epoch_has_every_row_once_in_a_different_order(self, model: Path, tmp_path: Path) -> None:
        info = prepare(some(12), model, build({"global_batch_size": 4, "epochs": 3}), 128, tmp_path)
        order = Prepared(tmp_path).order
        epochs = order.reshape(3, 12).tolist()
        assert info.total_steps == 9
        assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) == 3

    @pytest.mark.parametrize(
        ("rows", "batch", "epochs", "max_steps", "steps"),
        [(10, 4, 2, None, 5), (10, 4, 9, 3, 3), (10, 10, 1, None, 1), (10, 4, 1, 99, 2)],
    )
    def test_the_number_of_steps_follows_from_rows_epochs_and_batch_size(
        self,
        model: Path,
        tmp_path: Path,
        rows: int,
        batch: int,
        epochs: int,
        max_steps: int | None,
        steps: int,
    ) -> None:
        settings = build({"global_batch_size": batch, "epochs": epochs, "max_steps": max_steps})
        assert prepare(some(rows), model, settings, 128, tmp_path).total_steps == steps
        assert len(Prepared(tmp_path).order) == steps * batch

    def test_fewer_rows_than_a_batch_are_refused_with_both_numbers(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="global_batch_size 8 is more than the 5 rows") as error:
            prepare(some(5), model, build({"global_batch_size": 8, "epochs": 9}), 128, tmp_path)
        assert "--global-batch-size 5" in error.value.advice
        assert not (tmp_path / "info.json").exists()

    def test_long_rows_are_truncated_and_rows_that_lose_their_answer_are_dropped(
        self, model: Path, tmp_path: Path
    ) -> None:
        rows = [*some(4), chat("Hi", "word " * 100), chat("word " * 100, "Hi")]
        info = prepare(rows, model, build({"global_batch_size": 1}), 40, tmp_path)
        assert (info.rows, info.truncated_rows, info.dropped_rows, info.longest_row) == (5, 2, 1, 40)
        assert info.longest > 100
        text = summary(info, "mine.jsonl")
        for expected_text in (
            "mine.jsonl: 5 rows",
            "truncated at 40 tokens: 2 rows (33.3%)",
            "dropped: 1 rows",
        ):
            assert expected_text in text

    def test_a_dataset_without_usable_rows_is_refused(self, model: Path, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="Nothing is left to train on: none of 3 rows"):
            prepare(some(3), model, build({"global_batch_size": 1}), 5, tmp_path)

    def test_a_tokenizer_of_another_model_is_refused(self, base_model: Path, tmp_path: Path) -> None:
        config = json.loads((base_model / "config.json").read_text())
        (base_model / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
        with pytest.raises(UserError, match="vocab_size 300"):
            prepare(some(3), base_model, build({"global_batch_size": 1}), 128, tmp_path)

    def test_the_fingerprint_changes_with_every_value_that_changes_training(
        self, base_model: Path, tmp_path: Path
    ) -> None:
        def fingerprint(rows: list[Conversation], **settings: Any) -> str:
            values: dict[str, Any] = {"global_batch_size": 4, **settings}
            return prepare(rows, base_model, build(values), 128, tmp_path / "data").fingerprint

        same = fingerprint(some(12))
        assert (fingerprint(some(12)), fingerprint(some(12), optimizer={"lr": 1e-3})) == (same, same)
        other_fingerprints = [
            fingerprint(some(13)),
            fingerprint(some(12), seed=1),
            fingerprint(some(12), global_batch_size=2),
            fingerprint(some(12), epochs=2),
            fingerprint(some(12), packing=True, global_batch_size=1),
            fingerprint(some(12), train_on_prompt=True),
            fingerprint(some(12), chat_template=CHATML),
            fingerprint(some(12), longest_first=False),
        ]
        with (base_model / "tokenizer.json").open("a") as file:
            file.write("\n")
        assert len({same, *other_fingerprints, fingerprint(some(12))}) == len(other_fingerprints) + 2


def of_lengths(*lengths: int) -> list[Conversation]:
    return [chat("Say it", "word " * count) for count in lengths]


class TestLongestFirst:
    words = (3, 9, 1, 7, 2, 8, 5, 4, 10, 6, 12, 11)
    # What the seed draws for 12 rows and two epochs: the order of every release without this setting.
    DRAWN = (
        [6, 5, 4, 8, 0, 1, 9, 3, 7, 10, 11, 2],
        [7, 11, 9, 3, 2, 1, 4, 0, 8, 10, 6, 5],
    )

    def prepared(self, model: Path, folder: Path, **settings: Any) -> Prepared:
        values: dict[str, Any] = {"global_batch_size": 4, "epochs": 2, **settings}
        prepare(of_lengths(*self.words), model, build(values), 128, folder)
        return Prepared(folder)

    def test_the_first_step_has_the_longest_rows_unless_this_is_switched_off(
        self, model: Path, tmp_path: Path
    ) -> None:
        drawn = self.prepared(model, tmp_path / "off", longest_first=False).order.tolist()
        assert drawn == [*self.DRAWN[0], *self.DRAWN[1]]
        order = self.prepared(model, tmp_path / "on").order.tolist()
        assert [self.words[row] for row in order[:4]] == [12, 11, 10, 9]
        assert (order[:12], order[12:]) == ([10, 11, 8, 1, 0, 4, 9, 3, 7, 6, 5, 2], self.DRAWN[1])

    def test_packed_rows_keep_their_order(self, model: Path, tmp_path: Path) -> None:
        orders = [
            self.prepared(
                model, tmp_path / str(on), longest_first=on, packing=True, global_batch_size=1
            ).order.tolist()
            for on in (True, False)
        ]
        assert orders[0] == orders[1]

    def test_batches_grouped_by_length_follow_the_longest_rows_and_a_shorter_run_has_a_prefix(
        self, model: Path, tmp_path: Path
    ) -> None:
        data = self.prepared(model, tmp_path / "whole", group_by_length=True, global_batch_size=2)
        order = data.order.tolist()
        assert [self.words[row] for row in order[:2]] == [12, 11]
        assert sorted(order[:12]) == sorted(order[12:]) == list(range(12))
        shorter = self.prepared(
            model, tmp_path / "few", group_by_length=True, global_batch_size=2, max_steps=5
        )
        assert shorter.order.tolist() == order[:10]
        other = self.prepared(model, tmp_path / "drawn", global_batch_size=2)
        assert other.info.fingerprint != data.info.fingerprint


class TestTokenBudget:
    """Setting ``tokens``: steps that cover that many tokens."""

    def prepared(self, model: Path, folder: Path, tokens: int, **values: Any) -> Prepared:
        rows = [chat("Say it", "word " * n) for n in range(1, 12)]
        prepare(rows, model, build({"global_batch_size": 4, "tokens": tokens, **values}), 128, folder)
        return Prepared(folder)

    @pytest.mark.parametrize("packing", [False, True])
    @pytest.mark.parametrize("tokens", [1, 1000, 5000])
    def test_the_last_step_is_the_first_that_reaches_the_token_budget(
        self, model: Path, tmp_path: Path, tokens: int, packing: bool
    ) -> None:
        values = {"packing": packing, "global_batch_size": 2 if packing else 4}
        data = self.prepared(model, tmp_path, tokens, **values)
        counts = tokens_of_steps(data)
        assert sum(counts) >= tokens > sum(counts[:-1])
        assert len(data.order) == data.info.total_steps * data.info.global_batch_size

    def test_a_larger_token_budget_extends_the_order_of_a_smaller_one(
        self, model: Path, tmp_path: Path
    ) -> None:
        small_order = self.prepared(model, tmp_path / "few", 500).order.tolist()
        assert small_order == self.prepared(model, tmp_path / "many", 3000).order.tolist()[: len(small_order)]


class TestPlainText:
    """Task pretrain: documents are split, not truncated."""

    def test_a_long_document_is_split_and_no_token_is_lost(
        self, model: Path, tokenizer: Any, tmp_path: Path
    ) -> None:
        long, short = (Conversation(text="Once upon a time. " * count) for count in (40, 2))
        settings = build({"task": "pretrain", "global_batch_size": 1, "longest_first": False})
        info = prepare([long, short], model, settings, 50, tmp_path)
        (full_tokens, _), (last, _) = tokenize([long, short], tokenizer)
        data = Prepared(tmp_path)
        rows = [data.row(index) for index in range(len(data))]
        assert np.concatenate([row.tokens for row in rows]).tolist() == [
            *full_tokens.tolist(),
            *last.tolist(),
        ]
        pieces = -(-len(full_tokens) // 50)
        assert [len(row.tokens) for row in rows[: pieces - 1]] == [50] * (pieces - 1)
        assert (info.rows, info.pieces, info.split_rows) == (pieces + 1, pieces, 1)
        assert (info.truncated_rows, info.dropped_rows, info.longest) == (0, 0, len(full_tokens))
        for row in rows:
            assert (row.labels[0], row.labels[1:].tolist()) == (IGNORE, row.tokens[1:].tolist())
        ends = [row.tokens.tolist().count(tokenizer.eos_token_id) for row in rows]
        assert ends == [0] * (pieces - 1) + [1, 1]
        text = summary(info, "book.txt")
        assert text.startswith("book.txt: 2 documents, ")
        assert f"split at 50 tokens: 1 documents, into {pieces} pieces" in text

    def test_the_end_of_a_single_document_is_held_out_and_evaluated_in_pieces(
        self, model: Path, tmp_path: Path
    ) -> None:
        text = "".join(f"Sentence number {n}. " for n in range(400))
        settings = build({"task": "pretrain", "global_batch_size": 2, "evaluation": {"fraction": 0.1}})
        train, held_out = split([Conversation(text=text)], settings)
        assert (train[0].text or "") + (held_out[0].text or "") == text
        prepare(train, model, settings, 64, tmp_path, held_out)
        assert Prepared(tmp_path / "heldout").info.rows > 3
        [question] = map(json.loads, (tmp_path / "heldout.jsonl").read_text().splitlines())
        assert question["prompt"].startswith("<|begin_of_text|>")

    @given(
        lengths=st.lists(st.integers(1, 400) | st.just(20_000), min_size=1, max_size=60),
        fraction=st.floats(0.01, 0.5),
    )
    @hypothesis_settings(max_examples=50, deadline=None)
    def test_the_held_out_share_of_the_text_is_close_to_the_setting_for_any_document_lengths(
        self, lengths: list[int], fraction: float
    ) -> None:
        documents = [Conversation(text=("word " * length)[:length]) for length in lengths]
        train, held_out = split(documents, build({"task": "pretrain", "evaluation": {"fraction": fraction}}))
        sizes = [sum(len(row.text or "") for row in rows) for rows in (train, held_out)]
        assert sum(sizes) == sum(lengths)
        assert sizes[1] <= fraction * sum(lengths) + 1
        assert sizes[1] >= 0.4 * fraction * sum(lengths) - 10

    def test_a_share_of_each_dataset_is_held_out_up_to_the_maximum_that_is_evaluated(self) -> None:
        book = Conversation(text="word " * 100_000)
        pages = [Conversation(text="page " * 20, source=1) for _ in range(100)]
        settings = build({"task": "pretrain", "seq_len": 16, "mixture": {"pages.jsonl": 1}})
        _, held_out = split([book, *pages], settings)
        assert [row.source for row in held_out] == [0, *[1] * 5]
        assert len(held_out[0].text or "") == pytest.approx(256 * 16 * 4, abs=5)

    def test_nothing_is_held_out_if_the_fraction_is_zero(self) -> None:
        documents = [Conversation(text="one document. " * 50)]
        for evaluation in ({"fraction": 0}, {"dataset": "other.txt"}):
            assert split(documents, build({"task": "pretrain", "evaluation": evaluation})) == (documents, [])


class TestPacking:
    @given(lengths=st.lists(st.integers(1, 50), max_size=80), capacity=st.integers(50, 120))
    def test_packing_bins_hold_every_document_once_and_none_overflows(
        self, lengths: list[int], capacity: int
    ) -> None:
        bins = best_fit(lengths, capacity)
        assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
        assert all(0 < sum(lengths[i] for i in members) <= capacity for members in bins)
        positions = {
            index: place for place, index in enumerate(sorted(range(len(lengths)), key=lambda i: -lengths[i]))
        }
        for index, length in enumerate(lengths):  # no other bin had less space that was enough when it came
            spaces = [
                capacity - sum(lengths[i] for i in bin_ if positions[i] < positions[index]) for bin_ in bins
            ]
            (own_bins,) = (space for space, bin_ in zip(spaces, bins, strict=True) if index in bin_)
            assert own_bins == min(space for space in spaces if space >= length)

    @pytest.mark.parametrize(("least", "packed"), [(2, True), (50, False)])
    def test_a_small_dataset_is_packed_only_if_enough_steps_are_left(
        self, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], *, least: int, packed: bool
    ) -> None:
        settings = build({"global_batch_size": 4, "packing": True, "epochs": 2, "max_steps": 60})
        info = prepare(some(40), model, settings, 128, tmp_path, min_packed_steps=least)
        assert (info.packed, info.rows < 40) == (packed, packed)
        assert ("--packing true packs them anyway" in capsys.readouterr().out) != packed

    def test_the_seed_decides_which_documents_share_a_row(self, model: Path, tmp_path: Path) -> None:
        def tokens(seed: int, name: str) -> list[list[int]]:
            settings = build({"global_batch_size": 1, "packing": True, "seed": seed})
            prepare(some(40), model, settings, 128, tmp_path / name)
            data = Prepared(tmp_path / name)
            return [data.row(index).tokens.tolist() for index in range(len(data))]

        assert tokens(1, "first") == tokens(1, "again") != tokens(2, "other")

    def test_packing_keeps_every_token_and_label_in_its_document(self, model: Path, tmp_path: Path) -> None:
        rows = [*some(30), *(chat("Say it", "word " * n) for n in range(1, 20))]
        plain = prepare(rows, model, build({"global_batch_size": 1}), 64, tmp_path / "plain")
        packed = prepare(
            rows, model, build({"global_batch_size": 1, "packing": True}), 64, tmp_path / "packed"
        )
        assert packed.rows < plain.rows == packed.documents
        assert (packed.tokens, packed.label_tokens) == (plain.tokens, plain.label_tokens)

        def documents(folder: Path) -> list[tuple[Any, Any]]:
            result = []
            data = Prepared(folder)
            for index in range(len(data)):
                row = data.row(index)
                assert len(row.tokens) == row.lengths.sum() <= 64
                ends = np.cumsum(row.lengths)[:-1]
                parts = zip(np.split(row.tokens, ends), np.split(row.labels, ends), strict=True)
                result += [(tokens.tolist(), labels.tolist()) for tokens, labels in parts]
            return sorted(result)

        assert documents(tmp_path / "packed") == documents(tmp_path / "plain")
        assert all(labels[0] == IGNORE for _, labels in documents(tmp_path / "packed"))


class TestHeldOut:
    @given(rows=st.integers(1, 2000), fraction=st.floats(0, 0.99), seed=st.integers(0, 9))
    @hypothesis_settings(max_examples=50, deadline=None)
    def test_a_split_has_every_row_exactly_once(self, rows: int, fraction: float, seed: int) -> None:
        conversations = [Conversation(text=str(n)) for n in range(rows)]
        settings = build({"seed": seed, "evaluation": {"fraction": fraction}})
        train, held_out = split(conversations, settings)
        texts = [getattr(row, "text", "") for row in (*train, *held_out)]
        assert sorted(map(int, texts)) == list(range(rows))
        assert train
        share = min(max(1, round(fraction * rows)), 256, rows - 1)
        assert len(held_out) == (share if fraction else 0)
        second_split = split(conversations, settings)
        assert list(map(list, second_split)) == [list(train), list(held_out)]

    def test_held_out_rows_are_prepared_one_by_one_with_prompts_and_references(
        self, model: Path, tokenizer: Any, tmp_path: Path
    ) -> None:
        text = Conversation(text="Once upon a time there was a tree", line=9)
        held_out = [chat("Hi", "Hello", "Bye", "See you", line=4), text]
        settings = build({"global_batch_size": 4, "packing": False})
        prepare(some(12), model, settings, 128, tmp_path, held_out)
        data = Prepared(tmp_path / "heldout")
        assert (len(data), data.info.global_batch_size, data.order.tolist()) == (2, 1, [0, 1])
        first, second = map(json.loads, (tmp_path / "heldout.jsonl").read_text().splitlines())
        assert (first["reference"], first["line"]) == ("See you", 4)
        assert [m["content"] for m in first["messages"]] == ["Hi", "Hello", "Bye"]
        prompt = tokenizer(first["prompt"], add_special_tokens=False)["input_ids"]
        assert data.row(0).tokens[: len(prompt)].tolist() == prompt
        assert second["prompt"].startswith("<|begin_of_text|>Once")
        assert second["prompt"].removeprefix("<|begin_of_text|>") + second["reference"] == text.text

    def test_held_out_rows_of_an_earlier_preparation_are_removed(self, model: Path, tmp_path: Path) -> None:
        settings = build({"global_batch_size": 4})
        prepare(some(12), model, settings, 128, tmp_path, some(2))
        prepare(some(12), model, settings, 128, tmp_path)
        assert not (tmp_path / "heldout").exists()
        assert not (tmp_path / "heldout.jsonl").exists()

    def test_a_text_without_spaces_is_split_in_the_middle(self, tokenizer: Any) -> None:
        prompt, tail = prompt_of(Conversation(text="abcdef"), tokenizer)
        assert (prompt, tail) == ("<|begin_of_text|>abc", "def")


class TestSampleView:
    def test_masked_tokens_are_marked_and_long_parts_shortened(
        self, model: Path, tokenizer: Any, tmp_path: Path
    ) -> None:
        rows = [chat("Hi", "Hello"), chat("Hi", "word " * 2000)]
        settings = build({"global_batch_size": 1, "longest_first": False})
        prepare(rows, model, settings, 2048, tmp_path)
        data = Prepared(tmp_path)
        legend, view = format_sample(data, tokenizer).split("\n", 1)
        assert "does not count in the loss" in legend
        assert view.startswith("⟦<|begin_of_text|><|start_header_id|>user")
        assert view.endswith("⟧Hello<|eot_id|>")
        view = format_sample(data, tokenizer, 1)
        assert len(view) < 3000
        assert "characters ...]" in view

    def test_the_sample_view_separates_packed_documents(
        self, model: Path, tokenizer: Any, tmp_path: Path
    ) -> None:
        prepare(some(4), model, build({"global_batch_size": 1, "packing": True}), 256, tmp_path)
        view = format_sample(Prepared(tmp_path), tokenizer)
        assert "--- document 1 of 4 in this row" in view
        assert view.count("⟧It is ") == 4


class TestPairs:
    def test_a_pair_is_a_row_of_two_documents_in_which_the_last_answers_count(
        self, model: Path, tokenizer: Any, tmp_path: Path
    ) -> None:
        pair = Pair(
            chosen=chat("Hi", "Hello", "Bye", "See you", line=2),
            rejected=chat("Hi", "Hello", "Bye", "No", line=2),
        )
        settings = build({"global_batch_size": 2, "task": "dpo"})
        info = prepare([pair] * 3, model, settings, 128, tmp_path, [pair])
        data = Prepared(tmp_path)
        chosen, rejected = data.row(0).documents()
        assert (info.documents, info.longest_row, info.task) == (3, len(chosen.tokens), "dpo")
        for document, answer in ((chosen, "See you"), (rejected, "No")):
            counted = document.labels[document.labels != IGNORE].tolist()
            assert tokenizer.decode(counted) == f"{answer}<|eot_id|>"
        view = format_sample(data, tokenizer)
        assert "--- chosen, " in view
        assert "--- rejected, " in view
        assert summary(info, "pairs").startswith("pairs: 3 pairs, ")
        held_out = json.loads((tmp_path / "heldout.jsonl").read_text())
        assert (held_out["reference"], held_out["line"]) == ("See you", 2)
        assert len(Prepared(tmp_path / "heldout").row(0).lengths) == 2

    def test_a_pair_with_a_truncated_answer_is_left_out_and_the_longest_pair_is_first(
        self, model: Path, tmp_path: Path
    ) -> None:
        short = Pair(chosen=chat("Hi", "Hello"), rejected=chat("Hi", "No"))
        long = Pair(chosen=chat("Hi", "Hello"), rejected=chat("Hi", "No " * 30))
        far = Pair(chosen=chat("word " * 200, "Hello"), rejected=chat("word " * 200, "No"))
        settings = build({"global_batch_size": 2, "task": "orpo"})
        info = prepare([short] * 5 + [long, far] + [short] * 5, model, settings, 128, tmp_path)
        assert (info.rows, info.dropped_rows, info.truncated_rows) == (11, 1, 1)
        assert Prepared(tmp_path).order[0] == 5
