import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import datasets
import httpx2
import pytest
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError
from huggingface_hub.errors import RepositoryNotFoundError
from moto import mock_aws
from PIL import Image

from estimator.errors import UserError
from launchers.dataset import rows
from launchers.dataset.sources import fetch, kind_of
from launchers.images.attached import Reader

ROW = {"text": "hello"}


@pytest.mark.parametrize(
    ("dataset", "local"),
    [
        ("python-docs", True),
        ("support-tickets#test", True),
        ("data.jsonl", True),
        ("folder/data.Parquet", True),
        ("./org/name", True),
        ("org/name", False),
        ("org/name:main#validation", False),
        ("./folder#validation", True),
        ("s3://bucket/data.jsonl", False),
    ],
)
def test_built_in_datasets_and_paths_are_local(dataset: str, local: bool) -> None:
    assert (kind_of(dataset) in ("built-in", "path")) is local


def test_a_file_that_looks_like_a_hub_id_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").write_text(json.dumps(ROW))
    assert kind_of("org/name") == "path"
    assert fetch("org/name", tmp_path / "cache") == Path("org/name")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("dataset", ["python-docs", "support-tickets", "support-tickets#test"])
def test_a_built_in_dataset_is_generated_and_valid(tmp_path: Path, dataset: str) -> None:
    path = fetch(dataset, tmp_path / "cache")
    assert path.parent == tmp_path / "cache"
    assert list(rows.read(path))


def test_an_unknown_split_of_a_built_in_dataset_is_refused_with_its_splits(tmp_path: Path) -> None:
    train, test = (fetch(f"support-tickets#{split}", tmp_path).read_bytes() for split in ("train", "test"))
    assert fetch("support-tickets", tmp_path).read_bytes() == train != test
    with pytest.raises(UserError, match="Dataset support-tickets has no split dev") as refused:
        fetch("support-tickets#dev", tmp_path)
    assert refused.value.advice == "Use support-tickets#train, or support-tickets#test."


@pytest.mark.parametrize("dataset", ["nowhere.jsonl", "/no/such/file", "nonsense", "a/b/c"])
def test_a_missing_path_is_named(tmp_path: Path, dataset: str) -> None:
    with pytest.raises(UserError, match=f"There is no dataset {dataset}") as refused:
        fetch(dataset, tmp_path)
    assert "generated dataset: support-tickets, python-docs, drawn-shapes." in refused.value.advice


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("https://example.com/a b.jsonl", "Download it: curl -fLO 'https://example.com/a b.jsonl'"),
        ("https://huggingface.co/datasets/org/name", "Use --dataset org/name"),
        ("https://huggingface.co/datasets/org/name/viewer/default/train?p=1", "Use --dataset org/name"),
        ("gs://bucket/a.jsonl", "Download it."),
    ],
)
def test_an_address_is_refused_unchanged_with_what_to_use(tmp_path: Path, address: str, advice: str) -> None:
    with pytest.raises(UserError) as error:
        fetch(address, tmp_path)
    assert f"Dataset {address} " in error.value.problem
    assert error.value.advice == advice


class TestFolders:
    @pytest.fixture
    def saved(self, tmp_path: Path) -> Path:
        """Two splits as written by save_to_disk."""
        splits = {name: datasets.Dataset.from_list([{"text": name}] * 3) for name in ("train", "validation")}
        datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
        return tmp_path / "saved"

    def texts(self, dataset: str, tmp_path: Path) -> list[str | None]:
        assert kind_of(dataset) == "path"
        return [row.text for row in rows.read(fetch(dataset, tmp_path / "cache"))]

    def test_a_saved_split_is_read_by_its_name(self, saved: Path, tmp_path: Path) -> None:
        assert self.texts(str(saved), tmp_path) == ["train"] * 3
        assert self.texts(f"{saved}#validation", tmp_path) == ["validation"] * 3
        assert self.texts(str(saved / "validation"), tmp_path) == ["validation"] * 3

    def test_files_named_after_splits_are_the_splits(self, tmp_path: Path) -> None:
        folder = tmp_path / "files"
        folder.mkdir()
        (folder / "README.md").write_text("about")
        (folder / "train.csv").write_text("text\none\n")
        assert self.texts(str(folder), tmp_path) == ["one"]
        (folder / "test.jsonl").write_text(json.dumps({"text": "two"}))
        assert self.texts(str(folder), tmp_path) == ["one"]
        assert self.texts(f"{folder}#test", tmp_path) == ["two"]

    def test_a_missing_split_is_named_with_the_available_splits(self, saved: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file#1.jsonl").write_text(json.dumps(ROW))
        assert self.texts(str(tmp_path / "file#1.jsonl"), tmp_path) == ["hello"]
        for dataset, said in (
            (f"{saved}#test", "has train, validation, but no split test"),
            (f"{saved}/train#test", "is one split: there is no test in it"),
            (f"{tmp_path}/empty", "is a folder without rows"),
            (f"{tmp_path}/file#1.jsonl#train", "is a file: it has no split train"),
        ):
            with pytest.raises(UserError, match=said) as error:
                fetch(dataset, tmp_path)
            assert "\n" not in error.value.problem


class TestS3:
    @pytest.fixture
    def bucket(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with mock_aws():
            client = boto3.client("s3")
            client.create_bucket(Bucket="data")
            client.put_object(Bucket="data", Key="v1/train.jsonl", Body=json.dumps(ROW).encode())
            yield client

    @pytest.mark.usefixtures("bucket")
    def test_a_dataset_in_object_storage_is_downloaded(self, tmp_path: Path) -> None:
        path = fetch("s3://data/v1/train.jsonl", tmp_path / "cache")
        assert json.loads(path.read_text()) == ROW
        assert [p.name for p in path.parent.iterdir()] == ["train.jsonl"]

    @pytest.mark.usefixtures("bucket")
    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("s3://data/v2/train.jsonl", "no such key"),
            ("s3://data", "names no file"),
        ],
    )
    def test_missing_files_are_named(self, tmp_path: Path, url: str, expected: str) -> None:
        with pytest.raises(UserError, match=f"{url}.*{expected}"):
            fetch(url, tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_missing_credentials_are_reported_in_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name in ("CONFIG", "SHARED_CREDENTIALS"):
            monkeypatch.setenv(f"AWS_{name}_FILE", str(tmp_path / "none"))
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
        with pytest.raises(UserError, match="there are no AWS credentials"):
            fetch("s3://data/train.jsonl", tmp_path)


class TestHub:
    @pytest.fixture
    def answer(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[Any]]:
        """Make datasets.load_dataset return a value or raise an exception; its arguments are recorded."""
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        calls: list[Any] = []

        def set_answer(value: Any) -> list[Any]:
            def load_dataset(*arguments: Any, **options: Any) -> Any:
                calls.append((arguments, options))
                if isinstance(value, Exception):
                    raise value
                return value

            monkeypatch.setattr(datasets, "load_dataset", load_dataset)
            return calls

        return set_answer

    def test_the_train_split_is_written_as_jsonl(
        self, answer: Callable[[Any], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chats = [{"messages": [{"role": "user", "content": "é"}, {"role": "assistant", "content": "ok"}]}] * 3
        calls = answer(datasets.Dataset.from_list(chats))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        path = fetch("org/name:main", tmp_path)
        assert len(list(rows.read(path))) == 3
        assert calls == [(("org/name", "main"), {"split": "train", "token": "hf_secret"})]
        fetch("org/name#test", tmp_path)
        assert calls[1] == (("org/name", None), {"split": "test", "token": "hf_secret"})

    @pytest.mark.parametrize("column", ["image", "images"])
    def test_images_of_a_hub_dataset_are_stored_as_encoded_files(
        self, answer: Callable[[Any], list[Any]], tmp_path: Path, column: str
    ) -> None:
        chat = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "red"}]
        picture = Image.new("RGB", (8, 6), "red")
        picture.save(tmp_path / "red.png")
        value, feature = (str(tmp_path / "red.png"), datasets.Image())
        if column == "images":
            value, feature = [picture], datasets.List(datasets.Image())
        data = datasets.Dataset.from_list([{"messages": chat, column: value}] * 2)
        answer(data.cast_column(column, feature))
        path = fetch("org/pictures", tmp_path / "data")
        (tmp_path / "red.png").unlink()
        conversations = list(rows.read(path, images=Reader(folder=path.parent)))
        assert len(conversations) == 2
        (image,) = conversations[0].images
        assert Image.open(io.BytesIO(image)).size == (8, 6)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]

    @pytest.mark.parametrize(
        ("failure", "reason"),
        [
            (DatasetNotFoundError("Dataset 'o/n' doesn't exist on the Hub or cannot be accessed."), "not on"),
            (DatasetNotFoundError("Dataset 'o/n' is a gated dataset on the Hub. You must"), "gated and no"),
            (ConnectionError("Couldn't reach 'o/n' on the Hub"), "cannot be reached"),
            (ValueError("Config name is missing.\nPlease pick one"), "Config name is missing"),
            (DatasetGenerationError("An error occurred\nwith details"), "cannot be read: An error occurred"),
        ],
    )
    def test_each_download_failure_is_reported_in_one_line(
        self, answer: Callable[[Any], list[Any]], tmp_path: Path, failure: Exception, reason: str
    ) -> None:
        answer(failure)
        with pytest.raises(UserError) as error:
            fetch("o/n", tmp_path)
        assert reason in error.value.problem
        assert "\n" not in error.value.problem
        assert "dataset o/n" in error.value.problem.lower()
        assert list(tmp_path.iterdir()) == []

    def test_a_refused_token_is_not_repeated(
        self, answer: Callable[[Any], list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        request = httpx2.Request("GET", "http://hub/o/n", headers={"authorization": "Bearer hf_secret"})
        answer(RepositoryNotFoundError("no hf_secret", response=httpx2.Response(401, request=request)))
        with pytest.raises(UserError, match="HF_TOKEN: the Hugging Face Hub refuses this token") as error:
            fetch("o/n", tmp_path)
        assert "hf_secret" not in str(error.value)
