"""What commands print: text on stdout, everything about it on stderr."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from powerinfer.errors import UsageError


def say(message: str) -> None:
    """One line on stderr."""
    print(message, file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Text on stdout, at once. Characters that its encoding lacks are shown as escapes."""
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding or "ascii"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def read_text(path: Path) -> str:
    """Contents of a text file, `-` being stdin. Raises UsageError where it cannot be read or is not UTF-8."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}") from None


def ignore_interrupts() -> None:
    """From here on the process ends by itself, soon: one more Ctrl-C must not change its exit status."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def second_interrupt_exits() -> Iterator[None]:
    """Inside, a first Ctrl-C raises KeyboardInterrupt as ever; a second one ends the process at once, status 130.

    Python runs its own handlers between two of its instructions, and a long native call has none: so a thread listens
    for the signals as the interpreter's C code receives them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    receive, send = os.pipe()
    os.set_blocking(send, False)
    before = signal.set_wakeup_fd(send, warn_on_full_buffer=False)

    def listen() -> None:
        interrupts = 0
        while data := os.read(receive, 64):
            interrupts += data.count(signal.SIGINT)
            if interrupts > 1:
                os._exit(130)

    threading.Thread(target=listen, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(send)  # ends the thread
