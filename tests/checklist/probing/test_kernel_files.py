from pathlib import Path

import pytest

from checklist.probing.kernel_files import read_bytes, read_number, read_text


@pytest.mark.parametrize(
    ("content", "text", "number"),
    [
        (b"42\n", "42", 42),
        (b"max\n", "max", None),
        (b"  \n", None, None),
        (b"\xff\xfe", None, None),
        (None, None, None),
    ],
)
def test_values_that_a_kernel_file_lacks_are_unknown(
    tmp_path: Path, content: bytes | None, text: str | None, number: int | None
) -> None:
    file = tmp_path / "value"
    if content is not None:
        file.write_bytes(content)
    assert (read_text(file), read_number(file), read_bytes(file)) == (text, number, content or b"")
