"""A file that appears under its name only when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable
from types import TracebackType
from typing import BinaryIO

from powerinfer.errors import PowerInferError, UsageError
from powerinfer.formats.value_types import one_line


class OutputFile:
    """Writes to a temporary file beside the target and renames it at the end of the `with` block.

    Where the block raises (a full disk and Ctrl-C too), the temporary file is removed and the target stays as it was.
    A target that is a symbolic link is replaced where it points to. OSErrors of `write` come out as PowerInferErrors.
    """

    def __init__(self, path: str, check: Callable[[str], None] = lambda path: None) -> None:
        """check: called with the name of the complete temporary file; where it raises, that is removed.

        UsageError where there can be no file at `path`.
        """
        self.path, self._check = path, check
        self._shown = one_line(path, 400)
        try:
            self._target = os.path.realpath(path)
        except ValueError:  # a NUL in the path
            raise UsageError(f"cannot write {self._shown}: not a file name") from None
        if os.path.isdir(self._target):
            raise UsageError(f"cannot write {self._shown}: it is a directory")
        if os.path.exists(self._target) and not os.path.isfile(self._target):
            raise UsageError(f"cannot write {self._shown}: it is not a regular file")
        self._temporary = os.path.join(os.path.dirname(self._target), f".powerinfer-{secrets.token_hex(6)}.tmp")
        self._file: BinaryIO | None = None
        self._needed = 0

    def expect(self, nbytes: int) -> None:
        """How large the file will be, for the message of a full disk."""
        self._needed = nbytes

    def write(self, data: bytes | memoryview, offset: int | None = None) -> None:
        """Writes at the current position, or at `offset`; bytes never written to are zeros."""
        assert self._file is not None, "used outside its with block"
        try:
            if offset is not None:
                self._file.seek(offset)
            self._file.write(data)
        except OSError as error:
            raise self._error(error) from error

    def truncate(self, nbytes: int) -> None:
        """Cuts or extends (by zeros) to `nbytes`."""
        assert self._file is not None, "used outside its with block"
        try:
            self._file.truncate(nbytes)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> OutputFile:
        try:
            # Not tempfile: it makes files that only their owner can read, and the renamed one would stay so.
            self._file = open(self._temporary, "xb")
        except OSError as error:
            raise self._error(error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        try:
            if kind is None:
                self._file.close()  # flushes, so the disk can be full even now
                self._check(self._temporary)
                os.replace(self._temporary, self._target)
        except OSError as failure:
            self._discard()
            raise self._error(failure) from failure
        except BaseException:
            self._discard()
            raise
        if kind is not None:
            self._discard()

    def _discard(self) -> None:
        assert self._file is not None
        for step in (self._file.close, lambda: os.unlink(self._temporary)):
            # Closing flushes, which fails again on a full disk; what matters is the error underway.
            with contextlib.suppress(OSError):
                step()

    def _error(self, error: OSError) -> PowerInferError:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return UsageError(f"cannot write {self._shown}: {error.strerror or error}")
        needed = f", {self._needed} bytes are needed" if self._needed else ""
        return PowerInferError(f"cannot write {self._shown}: the disk is full{needed}{self._free()}")

    def _free(self) -> str:
        try:
            return f" and {shutil.disk_usage(os.path.dirname(self._target)).free} are free"
        except OSError:
            return ""
