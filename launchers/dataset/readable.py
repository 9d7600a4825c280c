"""Detection of files that must be converted before they can be read: compressed, or in another encoding."""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path

from estimator.errors import UserError

NOT_UTF_8 = "not UTF-8"  # first words of the reason why a row is unusable
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_ZIP = b"PK\x03\x04"
_LFS_POINTER = b"version https://git-lfs"
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # UTF-32's little-endian mark starts with the first


def check_readable(path: Path, beginning: bytes) -> None:
    """Raise UserError with a conversion command for a file that must be converted first.

    ``beginning``: the first bytes of the file.
    """
    kind = next((kind for magic, kind in _COMPRESSED.items() if beginning.startswith(magic)), None)
    if beginning.startswith(_ZIP):
        raise UserError(
            f"Dataset {path} is a zip archive, or a spreadsheet.", "Unpack it, or save the sheet as CSV."
        )
    if kind is not None:
        has_suffix = path.suffix in _COMPRESSED_SUFFIXES
        unpacked = path.with_suffix("") if has_suffix else path.with_stem(f"{path.stem}-unpacked")
        raise UserError(
            f"Dataset {path} is compressed ({kind}).",
            f"Unpack it: {kind} -dc < {shlex.quote(str(path))} > {shlex.quote(str(unpacked))}",
        )
    if beginning.startswith(_LFS_POINTER):
        raise UserError(f"Dataset {path} is a Git LFS pointer, not the data.", "Run: git lfs pull")
    if beginning.startswith(_UTF_16):
        is_utf32 = beginning.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE))
        encoding = "UTF-32" if is_utf32 else "UTF-16"
        raise UserError(f"Dataset {path} is {encoding}, not UTF-8.", conversion_advice(path, encoding))


def conversion_advice(path: Path, encoding: str = "ENCODING") -> str:
    """Return advice with the command that converts a file to UTF-8."""
    converted = shlex.quote(str(path.with_stem(f"{path.stem}-utf-8")))
    return f"Convert it: iconv -f {encoding} -t UTF-8 < {shlex.quote(str(path))} > {converted}"
