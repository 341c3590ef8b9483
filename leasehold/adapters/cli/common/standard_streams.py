"""Prepares the standard streams of a command, and turns a failure of standard output into a sentence and a status.

A shell closes a stream with `>&-`. Python then has None in its place: `print` writes nothing, or, where standard error
is closed, writes errors to standard output. The next file that is opened gets the free number, so whatever a child
process prints would end up in it.
"""

import errno
import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Output(io.FileIO):
    """Standard output, which remembers why it took no more; `began` is whether the process began with one."""

    def __init__(self, *, began: bool) -> None:
        super().__init__(1, "w", closefd=False)
        self.began, self.fault = began, cast("OSError | None", None)

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            if not self.began:
                # What ends a command whose reader has gone ends it here, too.
                raise BrokenPipeError(errno.EPIPE, "standard output is closed")
            written = super().write(data)
            self.fault = None
        except OSError as fault:
            self.fault = fault
            raise
        return written


class _NoInput(io.RawIOBase):
    """The standard input of a process that began without one."""

    def readable(self) -> bool:
        return True

    def readinto(self, _buffer: object) -> NoReturn:
        raise OSError("standard input is closed")


def prepare_streams() -> None:
    """Replace what is closed, and let an ASCII locale show what it cannot encode."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            file = os.open(os.devnull, os.O_RDWR)
            if file != number:
                os.dup2(file, number)
                os.close(file)
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or TextIOWrapper(io.BufferedReader(_NoInput()))
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    before, raw = sys.stdout, _Output(began=sys.stdout is not None)
    unbuffered = isinstance(getattr(before, "buffer", None), io.RawIOBase)  # PYTHONUNBUFFERED
    sys.stdout = TextIOWrapper(
        cast("io.BufferedWriter", raw) if unbuffered else io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None),
        line_buffering=before is not None and before.isatty(),
        write_through=unbuffered,
    )
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # the texts of help are not ASCII
            stream.reconfigure(errors="backslashreplace" if stream is sys.stderr else "replace")


def drop_output() -> None:
    """If standard output is closed, drop what the user's own code prints, as Python does."""
    raw = _raw()
    if raw is not None:
        raw.began = True  # its number is the null device's


def output_fault() -> OSError | None:
    """Return why standard output took no more the last time, or None if it did."""
    raw = _raw()
    return None if raw is None else raw.fault


def run_to_output(command: Callable[[], object]) -> NoReturn:
    """Run a command, and end with its status, or with 1 if its output could not be written, which is said.

    That the reader of a pipe has gone is not.
    """
    ended = SystemExit(0)
    try:
        command()
    except SystemExit as end:
        ended = end
    except OSError:
        if output_fault() is None:
            raise
    with suppress(OSError):
        sys.stdout.flush()
    raw = _raw()
    if raw is not None and raw.fault is not None:
        if not raw.began:
            print("leasehold: standard output is closed", file=sys.stderr)
        elif not isinstance(raw.fault, BrokenPipeError):
            print(f"leasehold: standard output cannot be written: {raw.fault.strerror}", file=sys.stderr)
        # Whatever is still buffered goes nowhere, or Python would fail on it again as it ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        raw.began = True
        ended = ended if ended.code else SystemExit(1)
    raise ended


def _raw() -> _Output | None:
    """Return our file below standard output; tests and callers in Python have another there."""
    found = getattr(sys.stdout, "buffer", None)
    found = getattr(found, "raw", found)
    return found if isinstance(found, _Output) else None
