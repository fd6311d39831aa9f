"""One GGUF file: header, metadata, tensor directory. A split model is several of these."""

from __future__ import annotations

from typing import Any

from powerinfer.errors import FormatError, UnsupportedError
from powerinfer.formats.cursor import Cursor
from powerinfer.formats.mapped_file import MappedFile
from powerinfer.formats.metadata import Metadata, read_metadata
from powerinfer.formats.tensor_info import TensorInfo, read_tensor_infos
from powerinfer.formats.value_types import RawBytes, ValueType, one_line

MAGIC = b"GGUF"
POWERINFER_MAGIC = b"PWRI"
VERSIONS = (2, 3)  # 3 differs from 2 only in that it may be big endian; 1 had 32-bit lengths
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32

# What people open by mistake, by its first bytes.
_OTHER_FORMATS = (
    ((b"lmgg", b"fmgg", b"tjgg", b"algg"), "a GGML file from before GGUF: convert the original model again"),
    ((b"PK\x03\x04",), "a zip archive, as torch.save writes: convert it to GGUF first"),
    ((b"vers",), "perhaps a Git LFS pointer: download the file itself"),
    ((b"<htm", b"<!DO", b"<!do"), "a web page: the download went wrong"),
    ((b"FUGG", b"IRWP"), "a big-endian file: only little-endian ones are supported"),
)


class Part:
    """A mapped GGUF file whose every count, length and offset has been checked against its size."""

    def __init__(self, path: str, index: int = 0) -> None:
        """`index` is the part's number in a split model, from 0.

        Raises UsageError where the file cannot be opened, FormatError where it is damaged, UnsupportedError for a
        version, byte order or tensor type that is not supported.
        """
        self.path = path
        self._file = MappedFile(path)
        try:
            cursor = Cursor(self._file.bytes, path)
            self.is_powerinfer, self.version = _read_header(cursor)
            n_tensors = cursor.u64("the number of tensors")
            n_keys = cursor.u64("the number of metadata keys")
            self.metadata: Metadata = read_metadata(cursor, n_keys)
            self.alignment = _read_alignment(cursor, self.metadata)
            self.tensors: list[TensorInfo] = read_tensor_infos(
                cursor, n_tensors, self.alignment, index, self.is_powerinfer
            )
        except BaseException:
            self._file.close()
            raise

    @property
    def bytes(self) -> RawBytes:
        """The whole file, uint8 (size,)."""
        return self._file.bytes

    def release_pages(self) -> None:
        self._file.release_pages()

    def close(self) -> None:
        self._file.close()

    def integer(self, key: str, default: int) -> int:
        """A metadata integer from 0 to 2^31; FormatError where it is something else."""
        value: Any = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            shown = one_line(repr(value))
            raise FormatError(f"{one_line(self.path, 400)}: {key} is {shown}: expected an integer from 0 to 2^31")
        return value


def _read_header(cursor: Cursor) -> tuple[bool, int]:
    magic = bytes(cursor.view[:4])
    if magic not in (MAGIC, POWERINFER_MAGIC):
        hint = next((hint for starts, hint in _OTHER_FORMATS if magic.startswith(starts)), "expected GGUF or PWRI")
        raise cursor.error(f"not a GGUF file: it starts with {magic!r}, {hint}")
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise UnsupportedError(f"{cursor.path}: the file is big endian: only little-endian files are supported")
    if version not in VERSIONS:
        raise UnsupportedError(f"{cursor.path}: GGUF version {version} is not supported: supported are 2, 3")
    return magic == POWERINFER_MAGIC, version


def _read_alignment(cursor: Cursor, metadata: Metadata) -> int:
    if ALIGNMENT_KEY not in metadata:
        return DEFAULT_ALIGNMENT
    kind = metadata.value_type(ALIGNMENT_KEY)
    if kind is not ValueType.UINT32:
        raise cursor.error(f"{ALIGNMENT_KEY} is of type {kind.label}: expected u32")
    value: int = metadata[ALIGNMENT_KEY]
    if not is_alignment(value):
        raise cursor.error(f"{ALIGNMENT_KEY} is {value}: expected a power of two from 8")
    return value


def is_alignment(value: int) -> bool:
    """A power of two that is a multiple of 8, as the specification wants it."""
    return value >= 8 and value & (value - 1) == 0
