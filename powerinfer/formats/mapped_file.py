"""Mapping a file read-only, with a clear line for whatever the system says no to."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat

import numpy as np

from powerinfer.errors import FormatError, UsageError
from powerinfer.formats.value_types import RawBytes, one_line

_REASONS = {
    errno.ENOENT: "no such file",
    errno.ENOTDIR: "no such file",
    errno.EACCES: "no permission to read it",
    errno.EPERM: "no permission to read it",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOMEM: "not enough address space to map it",
}


class MappedFile:
    """A file's bytes, uint8 (size,), read-only. Pages are read when they are touched.

    A file must not be shortened while it is mapped: the system ends a process that reads behind its end. Replacing it
    by a rename, as every writer here does, is safe.
    """

    def __init__(self, path: str, kind: str = "GGUF") -> None:
        """kind: of the file, for messages.

        Raises UsageError where the file cannot be opened, FormatError where it is empty.
        """
        self.path = path
        shown = one_line(path, 400)
        try:
            # Looked at before it is opened: opening a pipe would wait for somebody to write to it.
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise UsageError(f"{shown}: is a directory, expected a {kind} file")
            if not stat.S_ISREG(mode):
                raise UsageError(f"{shown}: is not a regular file, expected a {kind} file")
            with open(path, "rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise FormatError(f"{shown}: the file is empty")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
            raise UsageError(f"{shown}: cannot open the model: {reason}") from None
        except ValueError:  # a NUL in the path
            raise UsageError(f"{shown}: not a file name") from None
        self.bytes: RawBytes = np.frombuffer(self._map, np.uint8)

    def release_pages(self) -> None:
        """Gives the memory of pages read so far back to the system, which reads them again when they are touched."""
        if hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Gives the map back, at once or as soon as the last view of it is gone."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # views are alive: the map goes with them
            self._map.close()
