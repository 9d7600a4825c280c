"""Malicious inputs are refused or read within limits."""

from __future__ import annotations

import io
import json
import os
import resource
import tarfile
import time
import zlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from decorators.backends import pod_template
from decorators.packed_plan import unpack
from estimator import untrusted
from estimator.errors import UserError
from estimator.models import hf_files
from flows.finetune import artifacts
from launchers import settings
from launchers.dataset import files, render, rows, sources
from launchers.images import pictures
from launchers.inference import finished
from launchers.models import files as model_files
from launchers.models import fit, tiny_llama, weights
from launchers.store.bundles import LocalStorage, put_bundle
from tests.fuzz.limits import MIB, held_to, reset_peak, resident_peak
from tests.fuzz.readers import HEADER

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    path = tmp_path / "home" / "id_rsa"
    path.write_text(SECRET)
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("models") / "tiny")


def linked(tiny: Path, folder: Path) -> Path:
    """A model folder with hard-linked files, as in exports."""
    folder.mkdir(parents=True)
    for path in tiny.iterdir():
        os.link(path, folder / path.name)
    return folder


# Files outside of the folder


@pytest.mark.parametrize("place", ["vocab.txt", "deep/down/notes.md", "folder"])
def test_a_model_with_a_symbolic_link_out_of_its_folder_is_refused(
    tiny: Path, tmp_path: Path, secret: Path, place: str
) -> None:
    folder = linked(tiny, tmp_path / "model")
    weights.check_model_folder(folder)
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / place).symlink_to(secret.parent if place == "folder" else secret)
    for use in (weights.check_model_folder, finished.from_folder):
        with pytest.raises(UserError, match=f"{place} is a link that leads outside"):
            use(folder)
    with pytest.raises(UserError, match="leads outside"):
        put_bundle(LocalStorage(tmp_path / "store"), "b", folder)
    assert not list((tmp_path / "store").rglob("*"))


def test_a_snapshot_of_the_hub_cache_is_read_and_stored_through_its_links(tiny: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--me--model"
    blobs, snapshot = linked(tiny, repository / "blobs"), repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "unet").mkdir()
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (snapshot / "unet" / "config.json").symlink_to("../../../blobs/config.json")
    weights.check_model_folder(snapshot)
    stored = put_bundle(LocalStorage(tmp_path / "store"), "b", snapshot)
    assert {file.name for file in stored.files} == {path.name for path in blobs.iterdir()} | {
        "unet/config.json"
    }


@pytest.mark.parametrize(
    "blob", ["../../blobs/../../home/id_rsa", "../../blobs/leads-on", "../other/config.json"]
)
def test_a_snapshot_may_link_only_to_its_own_blobs(
    tiny: Path, tmp_path: Path, secret: Path, blob: str
) -> None:
    repository = tmp_path / "models--me--model"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "leads-on").symlink_to(secret)
    other = linked(tiny, repository / "snapshots" / "other")
    snapshot = linked(other, repository / "snapshots" / "0123")
    (snapshot / "vocab.txt").symlink_to(blob)
    with pytest.raises(UserError, match="leads outside"):
        weights.check_model_folder(snapshot)


def test_links_in_a_loop_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = linked(tiny, tmp_path / "model")
    (folder / "a.txt").symlink_to("b.txt")
    (folder / "b.txt").symlink_to("a.txt")
    with pytest.raises(UserError, match="path that cannot be read"):
        weights.check_model_folder(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_may_name_only_files_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside.safetensors").write_bytes(b"")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="is not a plain file name"):
        model_files.weight_files(folder)


def test_a_dataset_with_a_link_out_of_its_folder_is_refused(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").symlink_to(secret)
    with pytest.raises(UserError, match=r"train\.jsonl is a link that leads outside"):
        sources.local_path(str(folder))


@pytest.mark.parametrize(
    ("file", "value"),
    [
        ("dataset_dict.json", {"splits": ["../home"]}),
        ("state.json", {"_data_files": [{"filename": "../home/id_rsa"}]}),
    ],
)
def test_a_saved_dataset_may_name_only_parts_of_its_folder(
    tmp_path: Path, secret: Path, file: str, value: Any
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / file).write_text(json.dumps(value))
    with pytest.raises(UserError, match="cannot be read"):
        list(files.open_rows(sources.local_path(f"{folder}#train" if "splits" in value else str(folder))))


def test_a_staged_dataset_may_name_only_images_of_its_folder(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data" / "rows.jsonl"
    data.parent.mkdir()
    data.write_text(json.dumps({"file_name": "../home/id_rsa", "text": "key"}))
    store: Any = LocalStorage(tmp_path / "store")
    with pytest.raises(UserError, match=r"rows\.jsonl, line 1: \.\./home/id_rsa: a path that leads outside"):
        artifacts._stage_dataset(store, data, settings.build({"task": "text-to-image"}))
    assert not list((tmp_path / "store").rglob("*"))


# Time


def test_a_row_of_many_keys_with_a_duplicate_is_parsed_in_linear_time(tmp_path: Path) -> None:
    pairs = ",".join(f'"k{number}":1' for number in range(100_000))
    (tmp_path / "a.jsonl").write_text(f'{{{pairs},"k99999":1}}')
    assert (tmp_path / "a.jsonl").stat().st_size > MIB
    with held_to(MIB):
        ((_, row),) = files.open_rows(tmp_path / "a.jsonl")
    assert isinstance(row, files.BadRow)
    assert "k99999` is repeated" in str(row)


def test_a_header_of_many_columns_is_parsed_in_linear_time(tmp_path: Path) -> None:
    names = ",".join(f"c{number}" for number in range(20_000))
    (tmp_path / "a.csv").write_text(f"{names},c1\n")
    with held_to(MIB), pytest.raises(UserError, match="has two columns `c1`"):
        list(files.open_rows(tmp_path / "a.csv"))


def test_a_chat_template_that_never_ends_is_stopped(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(render, "TEMPLATE_LIMIT_S", 0.2)
    loops = "".join(f"{{% for i{depth} in range(99999) %}}" for depth in range(4)) + "{% endfor %}" * 4
    tokenizer = render.load_tokenizer(tiny, settings.build({"chat_template": loops}))
    chat = rows.Conversation(messages=(rows.Message(role="user", content="Hi"),))
    with held_to(MIB), pytest.raises(UserError, match=r"not finished after 0\.2 s"):
        render.render_messages(chat.messages, tokenizer)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 10**11 }}", "more than 512 MiB"),
        ("{% for i in range(99999) %}{{ 'a' * 10**6 }}{% endfor %}", "more than 512 MiB"),
        ("{{ messages[0]['content'] }}{{ 'a' * 10**8 }}", "100,000,002 characters of a chat of"),
    ],
)
def test_a_chat_template_is_limited_in_memory_and_output(tiny: Path, template: str, reason: str) -> None:
    pytest.importorskip("transformers")
    chat = (rows.Message(role="user", content="Hi"),)
    tokenizer = render.load_tokenizer(tiny, settings.build({"chat_template": template}))
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    before = reset_peak()
    with pytest.raises(UserError, match=reason):
        render.render_messages(chat, tokenizer)
    assert resident_peak() - before < 600 * MIB
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


# Memory


def test_a_sparse_member_of_a_tar_is_not_read(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    hole = tarfile.TarInfo("GNUSparseFile.0/a.png")
    hole.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "a.png",
        "GNU.sparse.realsize": str(3 * 1024 * MIB),
    }
    content = b"1\n0\n0\n".ljust(512, b"\0")
    hole.size = len(content)
    with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(hole, io.BytesIO(content))
    with held_to(tar.stat().st_size), pytest.raises(UserError, match="sparse file"):
        list(pictures.read(tar, min_side=1))


def test_parquet_that_decodes_to_gigabytes_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    values = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000, pyarrow.int32()), ["a" * 4 * MIB])
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": values}), file, compression="zstd", store_schema=False)
    assert file.stat().st_size < 1000
    with held_to(file.stat().st_size), pytest.raises(UserError, match="decompression bomb"):
        list(files.open_rows(file))


def repeated_value(tmp_path: Path, rows: int, *, nested: bool, size: int = MIB) -> Path:
    """Write a file that has one random value of ``size`` bytes, which all rows repeat."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    value = b64encode(os.urandom(size * 3 // 4)).decode()
    values = pyarrow.array([value]).dictionary_encode().dictionary
    repeated = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), values)
    if nested:  # all in one row
        repeated = pyarrow.ListArray.from_arrays(pyarrow.array([0, rows], pyarrow.int32()), repeated)
    table = pyarrow.table({"text": repeated})
    limit = {"dictionary_pagesize_limit": 2 * size, "store_schema": False}
    parquet.write_table(table, tmp_path / "a.parquet", **limit)
    return tmp_path / "a.parquet"


def test_parquet_is_decoded_in_batches_by_bytes(tmp_path: Path) -> None:
    file = repeated_value(tmp_path, 100, nested=False, size=8 * MIB)
    before = reset_peak()
    assert sum(len(row["text"]) for _, row in files.open_rows(file)) == 100 * 8 * MIB
    assert resident_peak() - before < 250 * MIB  # 16 rows of it would be 1 GiB


@pytest.mark.parametrize("nested", [False, True])
def test_parquet_that_repeats_one_value_endlessly_is_refused(tmp_path: Path, nested: bool) -> None:
    """A file of 1 MiB that decodes to 20 GiB."""
    file = repeated_value(tmp_path, 20_000, nested=nested)
    assert file.stat().st_size < 2 * MIB
    before, began = reset_peak(), time.process_time()
    with pytest.raises(UserError, match="decompression bomb"):
        for _ in files.open_rows(file):
            pass
    assert resident_peak() - before < 250 * MIB
    assert time.process_time() - began < 10


def test_a_parquet_row_with_oversized_lists_is_an_invalid_row(tmp_path: Path) -> None:
    before = reset_peak()
    ((_, row),) = files.open_rows(repeated_value(tmp_path, 100, nested=True))
    assert "more than 64 MiB of text" in str(row)
    assert resident_peak() - before < 50 * MIB


@pytest.mark.slow  # pyarrow writes 100 million values
def test_a_run_of_empty_values_in_parquet_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    count = 100_000_000
    values = pyarrow.ListArray.from_arrays(
        pyarrow.array([0, count], pyarrow.int32()), pyarrow.nulls(count, pyarrow.int8())
    )
    parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < MIB
    with held_to(MIB), pytest.raises(UserError, match="100,000,000 values"):
        list(files.open_rows(tmp_path / "a.parquet"))


def test_nested_parquet_rows_are_read_unchanged(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": f"q{n % 7}"}, {"role": "assistant", "content": None}][
                : n % 3
            ],
            "tags": ["a", "b"] if n % 2 else None,
            "scores": [0.5, float(n)],
            "image": {"bytes": b"x", "path": None},
            "n": n,
        }
        for n in range(300)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=77)
    assert [row for _, row in files.open_rows(tmp_path / "a.parquet")] == rows
    assert [row for _, row in files.open_rows(tmp_path / "a.parquet", ["messages"])] == [
        {"messages": row["messages"]} for row in rows
    ]


def test_aliases_of_yaml_are_refused() -> None:
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
    )
    with held_to(len(laughs)), pytest.raises(UserError, match="line 2: aliases"):
        settings.parse_yaml(laughs)
    with pytest.raises(UserError, match="aliases"):
        settings.parse_yaml("model: &a [*a]")


def test_decompression_of_a_packed_plan_is_limited() -> None:
    word = b64encode(zlib.compress(bytes(40 * MIB))).decode()
    with held_to(2 * MIB), pytest.raises(UserError, match="more than 16,777,216 bytes"):
        unpack(word)


@pytest.mark.parametrize("word", ["", "eJ", "not base64", b64encode(zlib.compress(b"{}")[:-4]).decode()])
def test_a_damaged_plan_is_reported_in_one_line(word: str) -> None:
    with pytest.raises(UserError, match=r"^The plan in FINETUNE_PLAN cannot be read: "):
        unpack(word)


@pytest.mark.parametrize("kind", ["expanded", "allocated"])
def test_weights_that_declare_more_than_the_file_allocate_nothing(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    from launchers.models import pickled

    path = tmp_path / "pytorch_model.bin"
    if kind == "expanded":
        torch.save({"w": torch.zeros(1).as_strided((2**40,), (0,))}, path)
    else:  # a pickle that calls torch.Tensor(2**30), which weights_only allows
        call = b"\x80\x02}q\x00X\x01\x00\x00\x00wctorch\nTensor\n\x8a\x05\x00\x00\x00\x40\x00\x85Rs."
        replace_pickle(path, call)
    with held_to(path.stat().st_size), pytest.raises(UserError, match="cannot be read as a model's weights"):
        pickled.read(path)


def replace_pickle(path: Path, data: bytes) -> None:
    import zipfile

    import torch

    torch.save({"w": torch.zeros(1)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, data if name.endswith("data.pkl") else content)


# One clear error


@pytest.mark.parametrize("depth", [200, 100_000])
def test_deeply_nested_files_are_reported_in_one_line(tmp_path: Path, depth: int) -> None:
    nested = '{"a":' + "[" * depth + "]" * depth + "}"
    (tmp_path / "config.json").write_text(nested)
    for read in (hf_files.read_directory, model_files.read_config, weights.check_model_folder):
        with held_to(len(nested)), pytest.raises(UserError, match="nested too deeply"):
            read(tmp_path)
    with (
        held_to(len(nested)),
        pytest.raises(UserError, match=r"line 1: it is nested too deeply|at most 131,072"),
    ):
        settings.parse_yaml(nested)


def test_parquet_with_invalid_text_is_an_invalid_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    text = pyarrow.array([b"fine", b"\xff\xfe"]).cast(pyarrow.string(), safe=False)
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    (_, first), (_, second) = files.open_rows(tmp_path / "a.parquet")
    assert first == {"text": "fine"}
    assert isinstance(second, files.BadRow)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_text_that_an_api_server_rejects_is_refused_in_pod_templates(name: str) -> None:
    with pytest.raises(UserError, match="null byte or half a surrogate"):
        pod_template.read({"spec": {"schedulerName": name}})


def test_a_panicking_tokenizer_is_reported_in_one_line(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = linked(tiny, tmp_path / "model")
    values = json.loads((folder / "tokenizer.json").read_text())
    values["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(a+)+$"}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(values))
    tokenizer = render.load_tokenizer(folder, settings.Settings())
    with pytest.raises(UserError, match="tokenizer fails on a text of the dataset"):
        list(render.tokenize([rows.Conversation(text="a" * 40 + "c")], tokenizer))


# The terminal


def test_errors_show_control_characters_instead_of_sending_them() -> None:
    error = UserError("Row \x1b]52;c;aGk=\x07 of \u202etxt.exe", "Remove \x9b2J.")
    assert str(error) == "Row \\x1b]52;c;aGk=\\x07 of \\u202etxt.exe\nRemove \\x9b2J."


def test_a_file_above_the_size_limit_of_its_kind_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**40)
    with held_to(MIB * 70), pytest.raises(UserError, match="has more than"):
        untrusted.read_json_object(path)


def test_a_safetensors_header_longer_than_the_file_is_not_read(tmp_path: Path) -> None:
    header = json.dumps(HEADER).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes((2**60).to_bytes(8, "little") + header)
    with held_to(path.stat().st_size), pytest.raises(UserError, match="is not a safetensors file"):
        model_files.read_header(path)


def test_a_config_with_more_layers_than_weights_is_not_built(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = linked(tiny, tmp_path / "model")
    fit.check_fits(folder)  # imports what it needs
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**5}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    with held_to(MIB), pytest.raises(UserError, match="num_hidden_layers 100,000, and the weights have"):
        fit.check_fits(folder)


@pytest.mark.parametrize(
    "sizes",
    [{"r": 10**9}, {"r": 8, "rank_pattern": {"q_proj": 10**9}}, {"num_virtual_tokens": 10**9}, {"r": "8"}],
)
def test_an_adapter_allocates_no_more_than_its_weights(tmp_path: Path, sizes: dict[str, Any]) -> None:
    header = json.dumps(
        {"a.lora_A.weight": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}}
    ).encode()
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(128))
    config = {"base_model_name_or_path": "llama-8b", "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8}
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(config))
    finished.from_folder(tmp_path)
    path.write_text(json.dumps(config | sizes))
    with held_to(MIB), pytest.raises(UserError, match="its weights have no dimension above 8"):
        finished.from_folder(tmp_path)
